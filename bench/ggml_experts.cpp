// The expert layer, and its first product alone, in ggml: the rival of bench/cpu_layer.py, which builds and calls this.
//
//   ggml_experts TYPE plain|repack THREADS E A H I SETS
//
// SETS copies of the layer's weights, so that none is found in the cache; expert ids change with every call. For each T that it reads
// it makes three calls and prints one JSON line with the seconds of the last: `gemm` is MUL_MAT_ID of the gate weights [I, H], `layer`
// is gate, up, SwiGLU, down, weighted sum.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

using Clock = std::chrono::steady_clock;

struct Experts {
    ggml_tensor *gate, *up, *down;
};

struct Graph {
    ggml_context *context;
    ggml_cgraph *graph;
    ggml_tensor *x, *ids, *weights, *out;
    ggml_backend_buffer_t buffer;
};

static ggml_type type_named(const std::string &name)
{
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const char *found = ggml_type_name(static_cast<ggml_type>(i));
        if (found && name == found) return static_cast<ggml_type>(i);
    }
    fprintf(stderr, "ggml has no type %s\n", name.c_str());
    exit(2);
}

static ggml_backend_buffer_type_t buffer_type(ggml_backend_t backend, bool repack)
{
    if (!repack) return ggml_backend_cpu_buffer_type();
    ggml_backend_dev_t device = ggml_backend_get_device(backend);
    auto extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
    for (auto *type = extra(device); type && *type; ++type)
        if (std::string(ggml_backend_buft_name(*type)) == "CPU_REPACK") return *type;
    fprintf(stderr, "ggml has no CPU_REPACK buffer\n");
    exit(2);
}

// y = W x for one expert's quantised rows.
static std::vector<double> multiply(ggml_type type, const std::vector<uint8_t> &w, int64_t rows, const std::vector<double> &x)
{
    std::vector<double> y(static_cast<size_t>(rows));
    std::vector<float> row(x.size());
    for (int64_t r = 0; r < rows; ++r) {
        const uint8_t *at = w.data() + static_cast<size_t>(r) * ggml_row_size(type, static_cast<int64_t>(x.size()));
        ggml_get_type_traits(type)->to_float(at, row.data(), static_cast<int64_t>(x.size()));
        for (size_t k = 0; k < x.size(); ++k) y[static_cast<size_t>(r)] += row[k] * x[k];
    }
    return y;
}

// Token 0's layer in double precision. All experts hold the same weights, gate and up too, and the A weights are 1/A.
static double relative_error(ggml_type type, const std::vector<uint8_t> &up, const std::vector<uint8_t> &down, int64_t I,
                             int64_t H, const std::vector<float> &x, const std::vector<float> &out)
{
    std::vector<double> h = multiply(type, up, I, std::vector<double>(x.begin(), x.begin() + H));
    for (double &v : h) v = v * v / (1 + std::exp(-v));
    const std::vector<double> y = multiply(type, down, H, h);
    double error = 0, norm = 0;
    for (size_t n = 0; n < y.size(); ++n) error += (out[n] - y[n]) * (out[n] - y[n]), norm += y[n] * y[n];
    return std::sqrt(error / norm);
}

static Graph build(ggml_backend_t backend, const Experts &w, int64_t T, int64_t A, bool whole)
{
    Graph g;
    ggml_init_params params = {ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true};
    ggml_context *c = g.context = ggml_init(params);
    const int64_t H = w.gate->ne[0];
    g.x = ggml_new_tensor_3d(c, GGML_TYPE_F32, H, 1, T);
    g.ids = ggml_new_tensor_2d(c, GGML_TYPE_I32, A, T);
    g.weights = ggml_new_tensor_3d(c, GGML_TYPE_F32, 1, A, T);
    g.out = ggml_mul_mat_id(c, w.gate, g.x, g.ids);
    if (whole) {
        ggml_tensor *h = ggml_swiglu_split(c, g.out, ggml_mul_mat_id(c, w.up, g.x, g.ids));
        ggml_tensor *y = ggml_mul(c, ggml_mul_mat_id(c, w.down, h, g.ids), g.weights);
        for (int64_t a = 0; a < A; ++a) {
            ggml_tensor *slot = ggml_view_2d(c, y, H, T, y->nb[2], a * y->nb[1]);
            g.out = a ? ggml_add(c, g.out, slot) : slot;
        }
        if (A == 1) g.out = ggml_cont(c, g.out);
    }
    g.graph = ggml_new_graph(c);
    ggml_build_forward_expand(g.graph, g.out);
    g.buffer = ggml_backend_alloc_ctx_tensors(c, backend);
    return g;
}

int main(int argc, char **argv)
{
    if (argc < 9) return 2;
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    const ggml_type type = type_named(argv[1]);
    const bool repack = std::string(argv[2]) == "repack";
    const int64_t E = atol(argv[4]), A = atol(argv[5]), H = atol(argv[6]), I = atol(argv[7]), sets = atol(argv[8]);
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, atoi(argv[3]));

    ggml_init_params params = {ggml_tensor_overhead() * static_cast<size_t>(3 * sets + 4), nullptr, true};
    ggml_context *c = ggml_init(params);
    std::vector<Experts> layers;
    for (int64_t s = 0; s < sets; ++s)
        layers.push_back({ggml_new_tensor_3d(c, type, H, I, E), ggml_new_tensor_3d(c, type, H, I, E),
                          ggml_new_tensor_3d(c, type, I, H, E)});
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(c, buffer_type(backend, repack));
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    if (repack && !layers[0].gate->extra) {
        fprintf(stderr, "ggml has no repack kernel for %s\n", argv[1]);
        return 3;
    }
    // One random expert, repeated: the values do not change the speed.
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 0.02f);
    std::vector<float> dense(static_cast<size_t>(H * I));
    for (float &v : dense) v = normal(random);
    std::vector<uint8_t> experts[2];
    for (auto [width, height, which] : std::vector<std::tuple<int64_t, int64_t, int>>{{H, I, 0}, {I, H, 1}}) {
        std::vector<uint8_t> &one = experts[which], all;
        one.resize(ggml_row_size(type, width) * static_cast<size_t>(height));
        ggml_quantize_chunk(type, dense.data(), one.data(), 0, height, width, nullptr);
        for (int64_t e = 0; e < E; ++e) all.insert(all.end(), one.begin(), one.end());
        for (Experts &w : layers)
            for (ggml_tensor *t : which ? std::vector{w.down} : std::vector{w.gate, w.up})
                ggml_backend_tensor_set(t, all.data(), 0, all.size());
    }

    for (int64_t T; std::cin >> T;) {
        printf("{\"T\": %ld", static_cast<long>(T));
        for (bool whole : {false, true}) {
            std::vector<Graph> graphs;
            for (const Experts &w : layers) graphs.push_back(build(backend, w, T, A, whole));
            std::vector<float> x(static_cast<size_t>(H * T)), weights(static_cast<size_t>(A * T), 1.0f / A);
            for (float &v : x) v = normal(random) * 50;
            double seconds = 0;
            for (size_t call = 0; call < 3; ++call) {
                Graph &g = graphs[call % graphs.size()];
                std::vector<int32_t> ids, order(static_cast<size_t>(E));
                std::iota(order.begin(), order.end(), 0);
                for (int64_t t = 0; t < T; ++t) {
                    std::shuffle(order.begin(), order.end(), random);
                    ids.insert(ids.end(), order.begin(), order.begin() + A);
                }
                ggml_backend_tensor_set(g.x, x.data(), 0, x.size() * 4);
                ggml_backend_tensor_set(g.ids, ids.data(), 0, ids.size() * 4);
                if (whole) ggml_backend_tensor_set(g.weights, weights.data(), 0, weights.size() * 4);
                const auto start = Clock::now();
                ggml_backend_graph_compute(backend, g.graph);
                seconds = std::chrono::duration<double>(Clock::now() - start).count();
            }
            printf(", \"%s\": %.9f", whole ? "layer" : "gemm", seconds);
            std::vector<float> out(static_cast<size_t>(ggml_nelements(graphs[0].out)));
            ggml_backend_tensor_get(graphs[0].out, out.data(), 0, out.size() * 4);
            if (whole) printf(", \"error\": %.5f", relative_error(type, experts[0], experts[1], I, H, x, out));
            for (Graph &g : graphs) {
                ggml_backend_buffer_free(g.buffer);
                ggml_free(g.context);
            }
        }
        printf("}\n");
        fflush(stdout);
    }
    return 0;
}
