// RMSNorm + modulate, with or without a gated residual before it. rms_norm_modulate.py and gated_residual.py hold the contracts.
// A block per row, of as many threads as torch's reduction has: the four elements of lane t in each chunk of 4·LANES are those that it
// gives it. At 16 rows or more that is one warp.
// The row stays in registers from the sum to the modulation, so each element is read from memory once.

template <int DTYPE>
__device__ void modulate(const void *scale, const void *shift, void *out, long long index, Quad n) {
    Quad s = Dtype<DTYPE>::unpack(load<DTYPE>(scale, index));
    const Quad b = Dtype<DTYPE>::unpack(load<DTYPE>(shift, index));
#pragma unroll
    for (int i = 0; i < 4; ++i) s.v[i] = 1.0f + s.v[i];
    s = rounded<DTYPE>(s);
#pragma unroll
    for (int i = 0; i < 4; ++i) n.v[i] = n.v[i] * s.v[i];
    n = rounded<DTYPE>(n);
#pragma unroll
    for (int i = 0; i < 4; ++i) n.v[i] = n.v[i] + b.v[i];
    store<DTYPE>(out, index, n);
}

// Blocks per multiprocessor, measured at 14,080 rows of 4,096 in bf16: 20 give 59.6 µs without an update (12: 65.2), 12 give 148.9 with
// one and two modulations (20: 154.1). What is read once is loaded like the rest: loads that tell the cache so (ld.global.cs) wait for
// earlier stores, 232 µs.
template <int DTYPE, int D, bool UPDATE, bool GATE, bool NORM, int OUTPUTS, int LANES, int ORDER>
__global__ void __launch_bounds__(LANES, DTYPE == FP32 || LANES > 32 ? 1 : UPDATE ? 12 : 20)
rms_norm_modulate(const void *__restrict__ x, const void *__restrict__ update, const void *__restrict__ gate,
                  void *__restrict__ hidden, const void *__restrict__ scale_0, const void *__restrict__ shift_0,
                  void *__restrict__ out_0, const void *__restrict__ scale_1, const void *__restrict__ shift_1,
                  void *__restrict__ out_1, const int *__restrict__ gate_index, const int *__restrict__ mod_0_index,
                  const int *__restrict__ mod_1_index, long long tokens, long long x_batch, long long x_token,
                  long long update_batch, long long update_token, long long gate_batch, long long gate_token,
                  long long mod_0_batch, long long mod_0_token, long long mod_1_batch, long long mod_1_token, double eps) {
    typedef Dtype<DTYPE> T;
    constexpr int CHUNKS = D / (4 * LANES);
    const int lane = threadIdx.x;
    const long long b = blockIdx.y, t = blockIdx.x, row = b * tokens + t;
    const unsigned zero = (unsigned)(tokens >> 63);
    x = at<DTYPE>(x, b * x_batch + t * x_token);

    typename T::Raw raw[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) raw[c] = load<DTYPE>(x, c * LANES + lane);

    if (UPDATE) {
        update = at<DTYPE>(update, b * update_batch + t * update_token);
        gate = at<DTYPE>(gate, gate_index ? gate_index[row] * gate_token : b * gate_batch + t * gate_token);
        hidden = at<DTYPE>(hidden, row * D);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            Quad h = T::unpack(raw[c]), u = T::unpack(load<DTYPE>(update, c * LANES + lane));
            if (GATE) {
                const Quad g = T::unpack(load<DTYPE>(gate, c * LANES + lane));
#pragma unroll
                for (int i = 0; i < 4; ++i) u.v[i] = u.v[i] * g.v[i];
                u = rounded<DTYPE>(u);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) h.v[i] = h.v[i] + u.v[i];
            raw[c] = T::pack(h);
            stay_packed(raw[c], zero);
            store<DTYPE>(hidden, c * LANES + lane, h);
        }
    }

    float rstd = 1.0f;
    if (NORM) {
        float a[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const Quad q = T::unpack(raw[c]);
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = a[i] + q.v[i] * q.v[i];
        }
        float sum = ((a[0] + a[1]) + a[2]) + a[3];
        if (LANES > 32) {
            __shared__ float sums[LANES];
#pragma unroll
            for (int offset = LANES / 2; offset >= 32; offset /= 2) {
                sums[lane] = sum;
                __syncthreads();
                sum += sums[lane ^ offset];
                __syncthreads();
            }
        }
#pragma unroll
        for (int step = 0; step < 5; ++step) sum += __shfl_xor_sync(0xffffffffu, sum, ORDER == 0 ? 16 >> step : 1 << step);
        rstd = rsqrtf(sum * (1.0f / D) + (float)eps);
    }

    const long long o_0 = mod_0_index ? mod_0_index[row] * mod_0_token : b * mod_0_batch + t * mod_0_token;
    const long long o_1 = mod_1_index ? mod_1_index[row] * mod_1_token : b * mod_1_batch + t * mod_1_token;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (NORM) stay_packed(raw[c], zero);
        Quad n = T::unpack(raw[c]);
        if (NORM) {
#pragma unroll
            for (int i = 0; i < 4; ++i) n.v[i] = n.v[i] * rstd;
            n = rounded<DTYPE>(n);
        }
        if (NORM && OUTPUTS == 0) store<DTYPE>(at<DTYPE>(out_0, row * D), c * LANES + lane, n);
        if (OUTPUTS > 0)
            modulate<DTYPE>(at<DTYPE>(scale_0, o_0), at<DTYPE>(shift_0, o_0), at<DTYPE>(out_0, row * D), c * LANES + lane, n);
        if (OUTPUTS > 1)
            modulate<DTYPE>(at<DTYPE>(scale_1, o_1), at<DTYPE>(shift_1, o_1), at<DTYPE>(out_1, row * D), c * LANES + lane, n);
    }
}
