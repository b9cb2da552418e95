// QK-norm + split RoPE. qk_norm_split_rope.py holds the contract. One block of 128 threads per token; thread t owns elements 4t..4t+3 of
// each chunk of 512, so that a head's second half lies head_dim / 8 lanes from its first.

// How a token's cos and sin are found: not at all, in full tables, or in compact tables: one row, or a row and a row of columns, which
// holds the channels of the last axis alone (rope_tables.py).
enum { NO_ROPE, FULL, ONE_ROW, ROW_AND_COLUMNS };

// From global to shared memory, without a register in between and without waiting.
__device__ void fetch(float *shared, const float *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global));
}
__device__ void wait_for_fetches() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What the lane `distance` away has.
__device__ uint2 of_lane(uint2 x, int distance) {
    return make_uint2(__shfl_xor_sync(0xffffffffu, x.x, distance), __shfl_xor_sync(0xffffffffu, x.y, distance));
}
__device__ float4 of_lane(float4 x, int distance) {
    return make_float4(__shfl_xor_sync(0xffffffffu, x.x, distance), __shfl_xor_sync(0xffffffffu, x.y, distance),
                       __shfl_xor_sync(0xffffffffu, x.z, distance), __shfl_xor_sync(0xffffffffu, x.w, distance));
}

// Of every three channels one is a column, and a quad of channels holds one or two: those at `place` and, where that is 0, at 3.
// `columns` has their cos in x and y, their sin in z and w.
__device__ void put_columns(float4 &cos, float4 &sin, float4 columns, int place) {
    cos.x = place == 0 ? columns.x : cos.x;
    sin.x = place == 0 ? columns.z : sin.x;
    cos.y = place == 1 ? columns.x : cos.y;
    sin.y = place == 1 ? columns.z : sin.y;
    cos.z = place == 2 ? columns.x : cos.z;
    sin.z = place == 2 ? columns.z : sin.z;
    cos.w = place == 0 ? columns.y : cos.w;
    sin.w = place == 0 ? columns.w : sin.w;
}

// The tokens of q and of k in one grid, a row of blocks for each batch row. PAIRED: q and k have as many tokens and the same tables, and a
// block takes a token of each. Otherwise a block takes one token, those of q first.
// Blocks per multiprocessor, measured at 14,080 tokens in bf16: of 4,096 channels 6 give 116.7 µs with compact tables (8: 128.4) and
// 161.1 with full ones (8: 164.0); of 2,048 channels 16 give 36.5 (12: 38.0).
template <int DTYPE, int D, int HEAD_DIM, bool NORM, int ROPE, bool PAIRED>
__global__ void __launch_bounds__(128, DTYPE == FP32 ? 1 : D > 2048 ? 6 : 16)
qk_norm_split_rope(const void *q, const void *k, const void *weight_q, const void *weight_k, void *out_q, void *out_k,
                   const float *cos_q, const float *sin_q, const float *columns_q, const int *rows_q, const float *cos_k,
                   const float *sin_k, const float *columns_k, const int *rows_k, long long tokens_q, long long tokens_k,
                   long long q_batch, long long q_token, long long k_batch, long long k_token, long long rope_q_batch,
                   long long rope_q_head, long long rope_q_token, long long rope_k_batch, long long rope_k_head,
                   long long rope_k_token, double eps_q, double eps_k) {
    typedef Dtype<DTYPE> T;
    typedef typename T::Raw Raw;
    constexpr int CHUNKS = D / 512, HALF = HEAD_DIM / 2, CHANNELS = D / 2, SIDES = PAIRED ? 2 : 1, TABLES = ROPE == ROW_AND_COLUMNS ? 3 : 2;
    const int t = threadIdx.x;
    const long long batch = gridDim.y, b = blockIdx.y;
    const bool is_k = !PAIRED && blockIdx.x >= tokens_q;
    const long long s = is_k ? blockIdx.x - tokens_q : blockIdx.x;
    const long long tokens = is_k ? tokens_k : tokens_q, row = b * tokens + s;
    const unsigned zero = (unsigned)(tokens >> 63);
    const void *x[2] = {is_k ? at<DTYPE>(k, b * k_batch + s * k_token) : at<DTYPE>(q, b * q_batch + s * q_token),
                        at<DTYPE>(k, b * k_batch + s * k_token)};
    const void *weight[2] = {is_k ? weight_k : weight_q, weight_k};
    void *out[2] = {at<DTYPE>(is_k ? out_k : out_q, row * D), at<DTYPE>(out_k, row * D)};
    const float eps[2] = {(float)(is_k ? eps_k : eps_q), (float)eps_k};

    Raw raw[SIDES][CHUNKS];
#pragma unroll
    for (int side = 0; side < SIDES; ++side)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) raw[side][c] = load<DTYPE>(x[side], c * 128 + t);

    // The tables come while the rows are summed; where each chunk waited for its own, it took 137 µs at 14,080 tokens.
    __shared__ __align__(16) float tables[ROPE == NO_ROPE ? 1 : TABLES][CHANNELS];
    if (ROPE) {
        const float *cos = is_k ? cos_k : cos_q, *sin = is_k ? sin_k : sin_q, *columns = is_k ? columns_k : columns_q;
        long long head = HALF;
        if (ROPE == FULL) {
            const long long first = is_k ? b * rope_k_batch + s * rope_k_token : b * rope_q_batch + s * rope_q_token;
            head = is_k ? rope_k_head : rope_q_head;
            cos += first;
            sin += first;
        } else {
            const int *rows = is_k ? rows_k : rows_q;
            cos += (long long)rows[row] * CHANNELS;
            sin += (long long)rows[row] * CHANNELS;
            if (ROPE == ROW_AND_COLUMNS) columns += (long long)rows[batch * tokens + row] * CHANNELS;
        }
#pragma unroll
        for (int o = 4 * t; o < CHANNELS; o += 512) {
            const long long from = o / HALF * head + o % HALF;
            fetch(tables[0] + o, cos + from);
            fetch(tables[1] + o, sin + from);
            if (ROPE == ROW_AND_COLUMNS) fetch(tables[TABLES - 1] + o, columns + o);
        }
    }

    float rstd[SIDES];
    __shared__ float warps[SIDES][4];
    if (NORM) {
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const Quad n = T::unpack(raw[side][c]);
#pragma unroll
                for (int i = 0; i < 4; ++i) sum = __fmaf_rn(n.v[i], n.v[i], sum);
            }
#pragma unroll
            for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            if (t % 32 == 0) warps[side][t / 32] = sum;
        }
    }
    if (ROPE) wait_for_fetches();
    if (NORM || ROPE) __syncthreads();
    if (NORM) {
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            const float *w = warps[side];
            rstd[side] = rsqrtf(((w[0] + w[2]) + (w[1] + w[3])) / (float)D + eps[side]);
        }
    }

    // A lane and the one with the other half of its heads share the work of two chunks: one rotates the first, the other the second.
    const bool is_first = 4 * t % HEAD_DIM < HALF;
    const int mine = is_first ? t : t + 128, others = is_first ? mine + HEAD_DIM / 8 : mine - HEAD_DIM / 8;
    const int channel = 4 * t / HEAD_DIM * HALF + 4 * t % HALF + (is_first ? 0 : 256);
    const int place = (2 + CHANNELS % 3 + 2 * channel) % 3;  // of the first column in a quad of channels; + 1 for each 512 more
#pragma unroll
    for (int c = 0; c < CHUNKS; c += 2) {
        float4 cos, sin;
        if (ROPE) {
            const int o = channel + c * 256;
            cos = *(const float4 *)(tables[0] + o);
            sin = *(const float4 *)(tables[1] + o);
            if (ROPE == ROW_AND_COLUMNS) {
                const int turn = c / 2 % 3;
                put_columns(cos, sin, *(const float4 *)(tables[TABLES - 1] + o), place + turn < 3 ? place + turn : place + turn - 3);
            }
            if (!is_first) sin = make_float4(-sin.x, -sin.y, -sin.z, -sin.w);
        }
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (!NORM) continue;
                stay_packed(raw[side][c + i], zero);
                Quad n = T::unpack(raw[side][c + i]);
                const Quad w = T::unpack(load<DTYPE>(weight[side], (c + i) * 128 + t));
#pragma unroll
                for (int j = 0; j < 4; ++j) n.v[j] = w.v[j] * (rstd[side] * n.v[j]);
                raw[side][c + i] = T::pack(n);
            }
            if (ROPE) {
                const Quad a = T::unpack(is_first ? raw[side][c] : raw[side][c + 1]);
                const Quad b = T::unpack(of_lane(is_first ? raw[side][c + 1] : raw[side][c], HEAD_DIM / 8));
                const float *cs = (const float *)&cos, *sn = (const float *)&sin;
                Quad turned_a, turned_b;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    turned_a.v[j] = __fmaf_rn(-sn[j], b.v[j], a.v[j] * cs[j]);
                    turned_b.v[j] = __fmaf_rn(sn[j], a.v[j], b.v[j] * cs[j]);
                }
                store<DTYPE>(out[side], c * 128 + mine, turned_a);
                store<DTYPE>(out[side], c * 128 + others, turned_b);
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) ((Raw *)out[side])[(c + i) * 128 + t] = raw[side][c + i];
            }
        }
    }
}
