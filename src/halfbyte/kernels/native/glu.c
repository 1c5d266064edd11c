/* CPU kernels of halfbyte.ops.glu and of experts' gated units: forward and backward, in one pass over memory.

   Arithmetic is in fp32, sixteen values at a time, also at a row's end: a row's result does not depend on its address
   or on other rows. */

#include "vectors.h"

enum { SILU, GELU_TANH };

typedef struct {
    void *z, *gate, *up, *out;            /* out: h of the forward; out and z have rows of `width` values */
    const float *weights;                 /* of slots, or NULL: ones */
    const int32_t *order;                 /* the slot of each row */
    float *products;                      /* ∂L/∂w of each slot, or NULL */
    int64_t width, gate_stride, up_stride;  /* row strides, in values */
    float limit, alpha, offset;
    int32_t interleaved, dtype, activation, need_output; /* interleaved: gate and up alternate from `gate` on */
} glu_job;

typedef struct { f16v gate, up; } pair;
typedef struct { f16v activated, derivative, shifted; } unit;

INLINE f16v all(float value) { return (f16v){0} + value; }

INLINE pair load_pair(const glu_job *job, int64_t row, int64_t at, int dtype, int count) {
    if (!job->interleaved)
        return (pair){load_values(job->gate, row * job->gate_stride + at, dtype, count),
                      load_values(job->up, row * job->up_stride + at, dtype, count)};
    int64_t from = row * job->gate_stride + 2 * at;
    f16v first = load_values(job->gate, from, dtype, count < 8 ? 2 * count : 16), second = {0};
    if (count > 8) second = load_values(job->gate, from + 16, dtype, 2 * count - 16);
    pair both;
    for (int i = 0; i < 8; i++) {
        both.gate[i] = first[2 * i], both.gate[8 + i] = second[2 * i];
        both.up[i] = first[2 * i + 1], both.up[8 + i] = second[2 * i + 1];
    }
    return both;
}

INLINE void store_pair(const glu_job *job, int64_t row, int64_t at, pair both, int dtype, int count) {
    if (!job->interleaved) {
        store_values(job->gate, row * job->gate_stride + at, quiet(both.gate), dtype, count);
        store_values(job->up, row * job->up_stride + at, quiet(both.up), dtype, count);
        return;
    }
    int64_t to = row * job->gate_stride + 2 * at;
    f16v first, second;
    for (int i = 0; i < 8; i++) {
        first[2 * i] = both.gate[i], first[2 * i + 1] = both.up[i];
        second[2 * i] = both.gate[8 + i], second[2 * i + 1] = both.up[8 + i];
    }
    store_values(job->gate, to, quiet(first), dtype, count < 8 ? 2 * count : 16);
    if (count > 8) store_values(job->gate, to + 16, quiet(second), dtype, 2 * count - 16);
}

INLINE f16v sigmoid(f16v x) { /* with exp(-|x|), which cannot overflow */
    f16v e = exp_of((f16v)((u16v)x | 0x80000000u));
    return choose(x > 0.0f, all(1.0f), e) / (1.0f + e);
}

INLINE unit unit_of(const glu_job *job, pair both, int activation) {
    f16v g = choose(both.gate > job->limit, all(job->limit), both.gate) * job->alpha;
    f16v u = choose(both.up > job->limit, all(job->limit), both.up);
    u = choose(u < -job->limit, all(-job->limit), u) + job->offset;
    const float root = 1.5957691216f; /* 2 √(2/π) */
    f16v square = g * g, inner = activation == SILU ? g : root * g * (1.0f + 0.044715f * square);
    f16v slope = activation == SILU ? all(1.0f) : root * (1.0f + 0.134145f * square), s = sigmoid(inner);
    return (unit){g * s / job->alpha, s * (1.0f + g * slope * (1.0f - s)), u};
}

INLINE void forward(const glu_job *job, int64_t first, int64_t last, int dtype, int activation) {
    for (int64_t row = first; row < last; row++)
        for (int64_t at = 0; at < job->width; at += 16) {
            int count = job->width - at < 16 ? (int)(job->width - at) : 16;
            unit u = unit_of(job, load_pair(job, row, at, dtype, count), activation);
            store_values(job->out, row * job->width + at, quiet(u.activated * u.shifted), dtype, count);
        }
}

INLINE void backward(const glu_job *job, int64_t first, int64_t last, int dtype, int activation) {
    for (int64_t row = first; row < last; row++) {
        float weight = job->weights ? job->weights[job->order[row]] : 1.0f;
        f16v total = {0};
        for (int64_t at = 0; at < job->width; at += 16) {
            int count = job->width - at < 16 ? (int)(job->width - at) : 16;
            pair both = load_pair(job, row, at, dtype, count);
            unit u = unit_of(job, both, activation);
            f16v z = load_values(job->z, row * job->width + at, dtype, count), dh = z * weight;
            f16v size = (f16v)((u16v)both.up & 0x7fffffffu), none = {0};
            pair found = {choose(both.gate > job->limit, none, dh * u.shifted * u.derivative),
                          choose(size > job->limit, none, dh * u.activated)};
            store_pair(job, row, at, found, dtype, count);
            if (job->need_output) {
                store_values(job->z, row * job->width + at, quiet(u.activated * u.shifted), dtype, count);
                if (job->products) total += z * load_values(job->z, row * job->width + at, dtype, count);
            }
        }
        if (job->products) job->products[job->order[row]] = sum(total);
    }
}

#define BY_ACTIVATION(pass, dtype)                                             \
    if (job->activation == SILU) pass(job, first, last, dtype, SILU);          \
    else pass(job, first, last, dtype, GELU_TANH)
#define BY_DTYPE(pass)                                                         \
    if (job->dtype == FP32) { BY_ACTIVATION(pass, FP32); }                     \
    else if (job->dtype == BF16) { BY_ACTIVATION(pass, BF16); }                \
    else { BY_ACTIVATION(pass, FP16); }

void halfbyte_glu(const glu_job *job, int64_t first, int64_t last) { BY_DTYPE(forward) }
void halfbyte_glu_backward(const glu_job *job, int64_t first, int64_t last) { BY_DTYPE(backward) }
