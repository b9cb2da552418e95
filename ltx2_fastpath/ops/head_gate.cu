// Head gate. head_gate.py holds the contract. A block takes a token and works out its gates once.

// One element of a row.
template <int DTYPE> __device__ float scalar(const void *row, int index) {
    if (DTYPE == FP32) return __ldg((const float *)row + index);
    const unsigned bits = __ldg((const unsigned short *)row + index);
    return Dtype<DTYPE == FP32 ? BF16 : DTYPE>::unpack(make_uint2(bits, 0)).v[0];
}

template <int DTYPE> __device__ float rounded_scalar(float value) { return rounded<DTYPE>({{value, 0.0f, 0.0f, 0.0f}}).v[0]; }

template <int DTYPE, int HEADS, int HEAD_DIM>
__global__ void __launch_bounds__(256)
head_gate(const void *x, const void *logits, void *out, long long tokens, long long x_batch, long long x_token, long long x_head,
          long long logits_batch, long long logits_token) {
    constexpr int QUADS = HEADS * HEAD_DIM / 4, STEPS = (QUADS + 255) / 256;
    const long long b = blockIdx.y, t = blockIdx.x, row = b * tokens + t;
    x = at<DTYPE>(x, b * x_batch + t * x_token);
    logits = at<DTYPE>(logits, b * logits_batch + t * logits_token);
    out = at<DTYPE>(out, row * HEADS * HEAD_DIM);

    typename Dtype<DTYPE>::Raw raw[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int q = threadIdx.x + 256 * i;
        if (q < QUADS) raw[i] = load<DTYPE>(at<DTYPE>(x, 4 * q / HEAD_DIM * x_head), q % (HEAD_DIM / 4));
    }
    __shared__ float gates[HEADS];
    for (int head = threadIdx.x; head < HEADS; head += 256) {
        const float sigmoid = rounded_scalar<DTYPE>(1.0f / (1.0f + expf(-scalar<DTYPE>(logits, head))));
        gates[head] = rounded_scalar<DTYPE>(2.0f * sigmoid);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int q = threadIdx.x + 256 * i;
        if (q >= QUADS) continue;
        Quad v = Dtype<DTYPE>::unpack(raw[i]);
        const float gate = gates[4 * q / HEAD_DIM];
#pragma unroll
        for (int j = 0; j < 4; ++j) v.v[j] = v.v[j] * gate;
        store<DTYPE>(out, q, v);
    }
}
