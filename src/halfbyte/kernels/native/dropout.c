/* Dropout with masks from a seed and an element's position, as specified in halfbyte.ops.dropout. */

#include "vectors.h"

typedef struct {
    const void *x;
    const int32_t *rows; /* of the mask, or NULL: those of x */
    void *out;
    int64_t columns, stride; /* stride: from row to row of x, in values */
    uint64_t seed;
    uint32_t first_column, threshold;
    float scale;
    int32_t dtype;
} dropout_job;

INLINE uint32_t fmix(uint32_t h) {
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}

INLINE void drop_rows(const dropout_job *job, int64_t first, int64_t last, int dtype) {
    const u16v lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint32_t low = fmix((uint32_t)job->seed), high = fmix((uint32_t)(job->seed >> 32));
    for (int64_t row = first; row < last; row++) {
        const uint32_t mask_row = (uint32_t)(job->rows ? job->rows[row] : row);
        const uint32_t first_key = fmix(mask_row + low), second_key = first_key * 0x9e3779b9u + high;
        for (int64_t at = 0; at < job->columns; at += 16) {
            int count = job->columns - at < 16 ? (int)(job->columns - at) : 16;
            u16v h = ((lanes + (uint32_t)at + job->first_column) ^ first_key) * 0x7feb352du;
            h = (h ^ h >> 15 ^ second_key) * 0x846ca68bu;
            f16v scaled = load_values(job->x, row * job->stride + at, dtype, count) * job->scale;
            scaled = (f16v)((i16v)scaled & (i16v)(h >= job->threshold));
            if (count == 16) store_values(job->out, row * job->columns + at, scaled, dtype, 16);
            else store_values(job->out, row * job->columns + at, scaled, dtype, count);
        }
    }
}

void halfbyte_dropout(const dropout_job *job, int64_t first, int64_t last) {
    if (job->dtype == FP32) drop_rows(job, first, last, FP32);
    else if (job->dtype == BF16) drop_rows(job, first, last, BF16);
    else drop_rows(job, first, last, FP16);
}
