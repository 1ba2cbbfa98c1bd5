/* The one copy, compiled: windows of a segment's rows into the memory of a batch.

   copy_windows() does what core/gather.py does with numpy, for all fields of a batch in one call, without temporary
   arrays and with the interpreter's lock let go. core/copying.py decides which of the two is used.

   A plan may come from a peer, and the memory may be written meanwhile by another process. So what is given is first
   copied (it is small), then checked to the last bound, and only then is a byte of the batch written. Rows that change
   during the copy are found by their stamps, which are compared afterwards. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_STEPS INT32_MAX

typedef struct {
    int64_t source; /* where the field begins in the segment */
    int64_t step;   /* bytes of a step */
    int64_t target; /* where it begins in the batch */
    int64_t pad;    /* the byte that padding consists of */
} Field;

typedef struct {
    const char *source;
    char *target;
    int64_t source_size, target_size;
    Field *fields;
    int64_t field_count;
    int32_t *rows, *starts, *first, *last; /* first and last: NULL for chunks */
    int64_t *stamps;                       /* NULL: not compared */
    int64_t windows, row_count, steps, length, history, mask, stamps_offset;
} Job;

/* Whether `count` elements of `size` bytes from `offset` on lie inside of `whole` bytes; nothing overflows. */
static int fits(int64_t offset, int64_t count, int64_t size, int64_t whole) {
    if (offset < 0 || size < 0 || offset > whole) {
        return 0;
    }
    return size == 0 || count <= (whole - offset) / size;
}

/* What is wrong with a job, or NULL. */
static const char *misfit(const Job *job) {
    if (job->row_count < 1 || job->row_count > MOST_STEPS || job->steps < 1 || job->steps > MOST_STEPS) {
        return "a segment has 1 to 2**31 - 1 rows and steps";
    }
    if (job->windows < 1 || job->length < 1 || job->length > MOST_STEPS) {
        return "a batch has at least one window of at least one step";
    }
    if (job->history < 0 || job->history > job->length || (job->history > 0) != (job->first != NULL)) {
        return "contexts come with bounds and chunks without, and no history is longer than its window";
    }
    if (job->windows > INT64_MAX / job->length) {
        return "a batch larger than any memory";
    }
    for (int64_t i = 0; i < job->field_count; i++) {
        const Field *field = &job->fields[i];
        if (!fits(field->source, job->row_count * job->steps, field->step, job->source_size)) {
            return "a field outside of the segment";
        }
        if (!fits(field->target, job->windows * job->length, field->step, job->target_size)) {
            return "a field outside of the batch";
        }
        if (field->pad < 0 || field->pad > UCHAR_MAX) {
            return "padding is made of bytes";
        }
    }
    if (job->mask != -1 && !fits(job->mask, job->windows * job->length, 1, job->target_size)) {
        return "the mask lies outside of the batch";
    }
    if (job->stamps != NULL && !fits(job->stamps_offset, job->row_count, 8, job->source_size)) {
        return "the stamps lie outside of the segment";
    }
    for (int64_t w = 0; w < job->windows; w++) {
        if (job->rows[w] < 0 || job->rows[w] >= job->row_count) {
            return "a row outside of the segment";
        }
        if (job->first == NULL) {
            if (job->starts[w] < 0 || job->starts[w] + job->length > job->steps) {
                return "a window outside of its row";
            }
        } else {
            int64_t now = job->starts[w] + job->history - 1;
            if (job->first[w] < 0 || job->last[w] > job->steps || now < job->first[w] || now >= job->last[w]) {
                return "a run outside of its row, or a now outside of its run";
            }
        }
    }
    return NULL;
}

static void copy_all(const Job *job) {
    const int64_t length = job->length;
    for (int64_t w = 0; w < job->windows; w++) {
        /* Of the window's steps, those from `low` to before `high` are real; the others are padding. */
        int64_t start = job->starts[w], low = 0, high = length;
        if (job->first != NULL) {
            low = job->first[w] - start;
            high = job->last[w] - start;
            low = low < 0 ? 0 : low;
            high = high > length ? length : high;
        }
        int64_t begin = job->rows[w] * job->steps + start + low;
        for (int64_t i = 0; i < job->field_count; i++) {
            const Field *field = &job->fields[i];
            const int64_t step = field->step;
            char *to = job->target + field->target + w * length * step;
            if (low > 0) {
                memset(to, (int)field->pad, (size_t)(low * step));
            }
            if (high > low) {
                memcpy(to + low * step, job->source + field->source + begin * step, (size_t)((high - low) * step));
            }
            if (high < length) {
                memset(to + high * step, (int)field->pad, (size_t)((length - high) * step));
            }
        }
        if (job->mask != -1) {
            char *mask = job->target + job->mask + w * length;
            int64_t heard = job->history > 0 ? job->history - 1 : 0;
            int64_t real = low > heard ? low : heard;
            memset(mask, 0, (size_t)length);
            if (high > real) {
                memset(mask + real, 1, (size_t)(high - real));
            }
        }
    }
}

/* Whether no row has got another stamp since the plan was made. */
static int unchanged(const Job *job) {
    int same = 1;
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* what was copied was read before the stamps are */
    for (int64_t w = 0; job->stamps != NULL && w < job->windows; w++) {
        int64_t stamp;
        memcpy(&stamp, job->source + job->stamps_offset + 8 * (int64_t)job->rows[w], sizeof(stamp));
        same &= stamp == job->stamps[w];
    }
    return same;
}

static int holds(const Py_buffer *view, int64_t bytes) { return view->len == (Py_ssize_t)bytes; }

PyDoc_STRVAR(
    copy_windows_doc,
    "copy_windows(source, target, fields, rows, starts, first, last, stamps, /, row_count, steps, length, history, mask,\n"
    "             stamps_offset)\n"
    "--\n\n"
    "Copy windows of ``length`` steps; whether their rows had the same stamps afterwards.\n\n"
    "``source`` is a segment, ``target`` the memory of a batch. ``fields`` is int64 ``[k, 4]``: where a field begins in\n"
    "the segment, its bytes a step, where it begins in the batch, and the byte that padding consists of. ``rows``,\n"
    "``starts``, ``first``, ``last`` are int32 ``[n]`` (the last two empty for chunks), ``stamps`` int64 ``[n]`` or\n"
    "empty: not compared. ``mask`` is where ``loss_mask`` begins in the batch, or -1.\n\n"
    "Raises:\n"
    "    ValueError: something does not fit; nothing was copied.");

static PyObject *copy_windows(PyObject *module, PyObject *args) {
    Py_buffer source, target, fields, rows, starts, first, last, stamps;
    long long row_count, steps, length, history, mask, stamps_offset;
    const char *wrong = NULL;
    char *own = NULL;
    int same = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*y*y*y*y*y*y*LLLLLL:copy_windows", &source, &target, &fields, &rows, &starts,
                          &first, &last, &stamps, &row_count, &steps, &length, &history, &mask, &stamps_offset)) {
        return NULL;
    }
    const int64_t n = rows.len / 4, bounds = first.len ? 4 * n : 0, stamped = stamps.len ? 8 * n : 0;
    const char *source_begin = source.buf, *target_begin = target.buf;
    if (fields.len % (Py_ssize_t)sizeof(Field) || !holds(&rows, 4 * n) || !holds(&starts, 4 * n) ||
        !holds(&first, bounds) || !holds(&last, bounds) || !holds(&stamps, stamped)) {
        wrong = "the sizes of the plan's parts disagree";
    } else if (source_begin < target_begin + target.len && target_begin < source_begin + source.len) {
        wrong = "segment and batch share memory";
    } else if ((own = malloc((size_t)(fields.len + stamped + 8 * n + 2 * bounds + 8))) == NULL) {
        wrong = "no memory for the plan";
    }
    if (wrong == NULL) {
        char *at = own;
        Job job;
        job.source = source.buf;
        job.target = target.buf;
        job.source_size = source.len;
        job.target_size = target.len;
        job.fields = memcpy(at, fields.buf, (size_t)fields.len);
        job.field_count = fields.len / (Py_ssize_t)sizeof(Field);
        at += fields.len;
        job.stamps = stamped ? memcpy(at, stamps.buf, (size_t)stamped) : NULL;
        at += stamped;
        job.rows = memcpy(at, rows.buf, (size_t)(4 * n));
        at += 4 * n;
        job.starts = memcpy(at, starts.buf, (size_t)(4 * n));
        at += 4 * n;
        job.first = bounds ? memcpy(at, first.buf, (size_t)bounds) : NULL;
        at += bounds;
        job.last = bounds ? memcpy(at, last.buf, (size_t)bounds) : NULL;
        job.windows = n;
        job.row_count = row_count;
        job.steps = steps;
        job.length = length;
        job.history = history;
        job.mask = mask;
        job.stamps_offset = stamps_offset;
        wrong = misfit(&job);
        if (wrong == NULL) {
            Py_BEGIN_ALLOW_THREADS
            copy_all(&job);
            same = unchanged(&job);
            Py_END_ALLOW_THREADS
        }
    }
    free(own);
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    PyBuffer_Release(&fields);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&first);
    PyBuffer_Release(&last);
    PyBuffer_Release(&stamps);
    if (wrong != NULL) {
        PyErr_SetString(PyExc_ValueError, wrong);
        return NULL;
    }
    return PyBool_FromLong(same);
}

static PyMethodDef methods[] = {
    {"copy_windows", copy_windows, METH_VARARGS, copy_windows_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_copy", "The one copy, compiled; see core/copying.py.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__copy(void) { return PyModuleDef_Init(&definition); }
