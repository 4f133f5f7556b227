"""Adapters to other libraries. Each registers itself through the other side's public interface; none patches
anything."""
