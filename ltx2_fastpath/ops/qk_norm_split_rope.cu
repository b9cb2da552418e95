// QK-norm + split RoPE. qk_norm_split_rope.py holds the contract. One block of 128 threads per row; thread t owns elements 4t..4t+3 of
// each chunk of 512, so that a head's second half lies head_dim / 8 lanes from its first.

template <int DTYPE, int D, int HEAD_DIM, bool NORM, bool ROPE>
__device__ void rotate_row(const void *p_x, const void *p_weight, void *p_out, const float *p_cos, const float *p_sin, long long row,
                           long long tokens, long long x_batch, long long x_token, long long rope_batch, long long rope_head,
                           long long rope_token, float eps) {
    typedef Dtype<DTYPE> T;
    constexpr int CHUNKS = D / 512, HALF = HEAD_DIM / 2;
    const int t = threadIdx.x;
    const long long b = row / tokens, s = row % tokens;
    p_x = at<DTYPE>(p_x, b * x_batch + s * x_token);
    p_out = at<DTYPE>(p_out, row * D);

    typename T::Raw raw[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) raw[c] = load<DTYPE>(p_x, c * 128 + t);

    // The tables do not depend on the reduction: ask for them before waiting on it.
    float4 cos[ROPE ? CHUNKS : 1], sin[ROPE ? CHUNKS : 1];
    if (ROPE) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int e = c * 512 + 4 * t;
            const long long o = b * rope_batch + s * rope_token + (e / HEAD_DIM) * rope_head + e % HALF;
            cos[c] = *(const float4 *)(p_cos + o);
            sin[c] = *(const float4 *)(p_sin + o);
        }
    }

    float rstd = 1.0f;
    if (NORM) {
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const Quad q = T::unpack(raw[c]);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum = __fmaf_rn(q.v[i], q.v[i], sum);
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        __shared__ float warps[4];
        if (t % 32 == 0) warps[t / 32] = sum;
        __syncthreads();
        rstd = rsqrtf(((warps[0] + warps[2]) + (warps[1] + warps[3])) / (float)D + eps);
    }

#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int e = c * 512 + 4 * t;
        Quad q = T::unpack(raw[c]);
        if (NORM) {
            const Quad w = T::unpack(load<DTYPE>(p_weight, c * 128 + t));
#pragma unroll
            for (int i = 0; i < 4; ++i) q.v[i] = w.v[i] * (rstd * q.v[i]);
            q = rounded<DTYPE>(q);
        }
        if (ROPE) {
            const bool first = e % HEAD_DIM < HALF;
            const float *cs = (const float *)&cos[c], *sn = (const float *)&sin[c];
            Quad r;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float other = __shfl_xor_sync(0xffffffffu, q.v[i], HEAD_DIM / 8);
                r.v[i] = __fmaf_rn(first ? -sn[i] : sn[i], other, q.v[i] * cs[i]);
            }
            q = r;
        }
        store<DTYPE>(p_out, c * 128 + t, q);
    }
}

// Rows of q and of k in one grid. Where both have as many rows they alternate, so that the k row finds the tables of its q row in L2.
template <int DTYPE, int D, int HEAD_DIM, bool NORM, bool ROPE>
__global__ void __launch_bounds__(128)
qk_norm_split_rope(const void *q, const void *k, const void *weight_q, const void *weight_k, void *out_q, void *out_k,
                   const float *cos_q, const float *sin_q, const float *cos_k, const float *sin_k, long long rows_q,
                   long long rows_k, long long tokens_q, long long tokens_k, long long q_batch, long long q_token,
                   long long k_batch, long long k_token, long long rope_q_batch, long long rope_q_head, long long rope_q_token,
                   long long rope_k_batch, long long rope_k_head, long long rope_k_token, double eps_q, double eps_k) {
    long long row = blockIdx.x;
    bool is_k;
    if (rows_q == rows_k) {
        is_k = row & 1;
        row >>= 1;
    } else {
        is_k = row >= rows_q;
        if (is_k) row -= rows_q;
    }
    rotate_row<DTYPE, D, HEAD_DIM, NORM, ROPE>(
        is_k ? k : q, is_k ? weight_k : weight_q, is_k ? out_k : out_q, is_k ? cos_k : cos_q, is_k ? sin_k : sin_q, row,
        is_k ? tokens_k : tokens_q, is_k ? k_batch : q_batch, is_k ? k_token : q_token, is_k ? rope_k_batch : rope_q_batch,
        is_k ? rope_k_head : rope_q_head, is_k ? rope_k_token : rope_q_token, (float)(is_k ? eps_k : eps_q));
}
