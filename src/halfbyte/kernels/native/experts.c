/* CPU kernels of halfbyte.ops.experts: combination of the experts' outputs, in fp32. */

#include "vectors.h"

typedef struct {
    const void *rows;      /* [S, width] */
    const int32_t *place;
    const float *weights;  /* [T, top_k], or NULL: ones */
    void *out;             /* [T, width] */
    int64_t width, top_k;
    int32_t dtype;
} combine_job;

INLINE void combine(const combine_job *job, int64_t first, int64_t last, int dtype) {
    for (int64_t token = first; token < last; token++)
        for (int64_t at = 0; at < job->width; at += 16) {
            int count = job->width - at < 16 ? (int)(job->width - at) : 16;
            f16v total = {0};
            for (int64_t j = 0; j < job->top_k; j++) {
                int64_t slot = token * job->top_k + j;
                f16v found = load_values(job->rows, job->place[slot] * job->width + at, dtype, count);
                total += job->weights ? found * job->weights[slot] : found;
            }
            store_values(job->out, token * job->width + at, quiet(total), dtype, count);
        }
}

/* Combine for tokens [first, last). */
void halfbyte_combine(const combine_job *job, int64_t first, int64_t last) {
    if (job->dtype == FP32) combine(job, first, last, FP32);
    else if (job->dtype == BF16) combine(job, first, last, BF16);
    else combine(job, first, last, FP16);
}
