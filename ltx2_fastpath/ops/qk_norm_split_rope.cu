// QK-norm + split RoPE. qk_norm_split_rope.py holds the contract. One block of 128 threads per row; thread t owns elements 4t..4t+3 of
// each chunk of 512, so that a head's second half lies head_dim / 8 lanes from its first.

// How a row's cos and sin are found: not at all, in full tables, or in rows of compact tables: one row, or two whose non-zero channels
// are disjoint, so that their bits are simply united.
enum { NO_ROPE, FULL, ONE_ROW, TWO_ROWS };

__device__ float4 united(float4 a, float4 b) {
    const uint4 x = *(const uint4 *)&a, y = *(const uint4 *)&b;
    const uint4 z = make_uint4(x.x | y.x, x.y | y.y, x.z | y.z, x.w | y.w);
    return *(const float4 *)&z;
}

// Rows of q and of k in one grid. PAIRED: q and k have as many rows and the same tables, a block takes a row of each and reads its
// tables once. Otherwise a block takes one row, those of q first.
// Blocks per multiprocessor, measured at 14,080 rows of 4,096 in bf16: 5 gives 163 µs with full tables (3: 181), 8 gives 140 with compact
// ones (5: 147).
template <int DTYPE, int D, int HEAD_DIM, bool NORM, int ROPE, bool PAIRED>
__global__ void __launch_bounds__(128, DTYPE == FP32 ? 1 : ROPE == TWO_ROWS ? 8 : 5)
qk_norm_split_rope(const void *q, const void *k, const void *weight_q, const void *weight_k, void *out_q, void *out_k,
                   const float *cos_q, const float *sin_q, const float *cos_k, const float *sin_k, const int *table_rows_q,
                   const int *table_rows_k, long long batch, long long tokens_q, long long tokens_k, long long q_batch,
                   long long q_token, long long k_batch, long long k_token, long long rope_q_batch, long long rope_q_head,
                   long long rope_q_token, long long rope_k_batch, long long rope_k_head, long long rope_k_token, double eps_q,
                   double eps_k) {
    typedef Dtype<DTYPE> T;
    constexpr int CHUNKS = D / 512, HALF = HEAD_DIM / 2, SIDES = PAIRED ? 2 : 1;
    const int t = threadIdx.x;
    long long row = blockIdx.x;
    bool is_k = false;
    if (!PAIRED && row >= batch * tokens_q) {
        row -= batch * tokens_q;
        is_k = true;
    }
    const long long tokens = is_k ? tokens_k : tokens_q;
    const long long b = row / tokens, s = row % tokens;
    const unsigned zero = (unsigned)(batch >> 63);
    const void *x[2] = {is_k ? at<DTYPE>(k, b * k_batch + s * k_token) : at<DTYPE>(q, b * q_batch + s * q_token),
                        at<DTYPE>(k, b * k_batch + s * k_token)};
    const void *weight[2] = {is_k ? weight_k : weight_q, weight_k};
    void *out[2] = {at<DTYPE>(is_k ? out_k : out_q, row * D), at<DTYPE>(out_k, row * D)};
    const float eps[2] = {(float)(is_k ? eps_k : eps_q), (float)eps_k};

    typename T::Raw raw[SIDES][CHUNKS];
#pragma unroll
    for (int side = 0; side < SIDES; ++side)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) raw[side][c] = load_once<DTYPE>(x[side], c * 128 + t);

    const float *p_cos = is_k ? cos_k : cos_q, *p_sin = is_k ? sin_k : sin_q;
    long long first = 0, second = 0, head = HALF;
    if (ROPE == FULL) {
        first = is_k ? b * rope_k_batch + s * rope_k_token : b * rope_q_batch + s * rope_q_token;
        head = is_k ? rope_k_head : rope_q_head;
    } else if (ROPE) {
        const int *table_rows = is_k ? table_rows_k : table_rows_q;
        first = table_rows[row] * (D / 2LL);
        if (ROPE == TWO_ROWS) second = table_rows[batch * tokens + row] * (D / 2LL);
    }

    float rstd[SIDES];
    if (NORM) {
        __shared__ float warps[SIDES][4];
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
        __syncthreads();
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            const float *w = warps[side];
            rstd[side] = rsqrtf(((w[0] + w[2]) + (w[1] + w[3])) / (float)D + eps[side]);
        }
    }

#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int e = c * 512 + 4 * t;
        float4 cos, sin;
        if (ROPE) {
            const long long o = (e / HEAD_DIM) * head + e % HALF;
            cos = __ldg((const float4 *)(p_cos + first + o));
            sin = __ldg((const float4 *)(p_sin + first + o));
            if (ROPE == TWO_ROWS) {
                cos = united(cos, __ldg((const float4 *)(p_cos + second + o)));
                sin = united(sin, __ldg((const float4 *)(p_sin + second + o)));
            }
        }
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            if (NORM) stay_packed(raw[side][c], zero);
            Quad n = T::unpack(raw[side][c]);
            if (NORM) {
                const Quad w = T::unpack(load<DTYPE>(weight[side], c * 128 + t));
#pragma unroll
                for (int i = 0; i < 4; ++i) n.v[i] = w.v[i] * (rstd[side] * n.v[i]);
                n = rounded<DTYPE>(n);
            }
            if (ROPE) {
                const bool is_first = e % HEAD_DIM < HALF;
                const float *cs = (const float *)&cos, *sn = (const float *)&sin;
                Quad turned;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float other = __shfl_xor_sync(0xffffffffu, n.v[i], HEAD_DIM / 8);
                    turned.v[i] = __fmaf_rn(is_first ? -sn[i] : sn[i], other, n.v[i] * cs[i]);
                }
                n = turned;
            }
            store<DTYPE>(out[side], c * 128 + t, n);
        }
    }
}
