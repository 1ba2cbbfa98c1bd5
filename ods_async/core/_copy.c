/* The one copy, compiled: windows of a segment's rows into the memory of a batch.

   copy_windows() does what core/gather.py does with numpy, for all fields of any number of batches in one call, without
   temporary arrays and with the interpreter's lock let go. core/copying.py decides which of the two is used.

   A plan may come from a peer, and the memory may be written meanwhile by another process. So what is given is first
   copied (it is small), then checked to the last bound, and only then is a byte of any batch written. Rows that change
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

/* One batch to be filled: what is held while that lasts, and the job made of it. */
typedef struct {
    Job job;
    Py_buffer target, rows, starts, first, last, stamps;
    char *own; /* the plan, copied */
    int held, same;
} Order;

static void let_go(Order *orders, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count && orders[i].held; i++) {
        Order *order = &orders[i];
        free(order->own);
        PyBuffer_Release(&order->target);
        PyBuffer_Release(&order->rows);
        PyBuffer_Release(&order->starts);
        PyBuffer_Release(&order->first);
        PyBuffer_Release(&order->last);
        PyBuffer_Release(&order->stamps);
    }
    free(orders);
}

/* Make an order of what was given: 0, or -1 with an exception. `common` is what all jobs share. */
static int take(Order *order, PyObject *given, const Job *common) {
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a batch to be filled is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(given, "w*y*y*y*y*y*:copy_windows", &order->target, &order->rows, &order->starts,
                          &order->first, &order->last, &order->stamps)) {
        return -1;
    }
    order->held = 1;
    const Py_buffer *rows = &order->rows, *starts = &order->starts, *first = &order->first, *last = &order->last;
    const int64_t n = rows->len / 4, bounds = first->len ? 4 * n : 0, stamped = order->stamps.len ? 8 * n : 0;
    const char *target = order->target.buf, *wrong = NULL;
    if (!holds(rows, 4 * n) || !holds(starts, 4 * n) || !holds(first, bounds) || !holds(last, bounds) ||
        !holds(&order->stamps, stamped)) {
        wrong = "the sizes of the plan's parts disagree";
    } else if (common->source < target + order->target.len && target < common->source + common->source_size) {
        wrong = "segment and batch share memory";
    } else if ((order->own = malloc((size_t)(stamped + 8 * n + 2 * bounds + 8))) == NULL) {
        wrong = "no memory for the plan";
    } else {
        Job *job = &order->job;
        char *at = order->own;
        *job = *common;
        job->target = order->target.buf;
        job->target_size = order->target.len;
        job->stamps = stamped ? memcpy(at, order->stamps.buf, (size_t)stamped) : NULL;
        at += stamped;
        job->rows = memcpy(at, rows->buf, (size_t)(4 * n));
        at += 4 * n;
        job->starts = memcpy(at, starts->buf, (size_t)(4 * n));
        at += 4 * n;
        job->first = bounds ? memcpy(at, first->buf, (size_t)bounds) : NULL;
        at += bounds;
        job->last = bounds ? memcpy(at, last->buf, (size_t)bounds) : NULL;
        job->windows = n;
        wrong = misfit(job);
    }
    if (wrong != NULL) {
        PyErr_SetString(PyExc_ValueError, wrong);
        return -1;
    }
    return 0;
}

/* Fill all batches, without the interpreter's lock, and list how each went. */
static PyObject *carried_out(Order *orders, Py_ssize_t count) {
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        copy_all(&orders[i].job);
        orders[i].same = unchanged(&orders[i].job);
    }
    Py_END_ALLOW_THREADS
    PyObject *went = PyList_New(count);
    for (Py_ssize_t i = 0; went != NULL && i < count; i++) {
        PyList_SetItem(went, i, PyBool_FromLong(orders[i].same));
    }
    return went;
}

PyDoc_STRVAR(
    copy_windows_doc,
    "copy_windows(source, fields, batches, /, row_count, steps, length, history, mask, stamps_offset)\n"
    "--\n\n"
    "Copy windows of ``length`` steps; for each batch, whether its rows had the same stamps afterwards.\n\n"
    "``source`` is a segment. ``fields`` is int64 ``[k, 4]``: where a field begins in the segment, its bytes a step,\n"
    "where it begins in a batch, and the byte that padding consists of. ``batches`` is a tuple of tuples ``(target,\n"
    "rows, starts, first, last, stamps)``: the memory of a batch, and its plan: int32 ``[n]`` each (``first`` and\n"
    "``last`` empty for chunks), ``stamps`` int64 ``[n]`` or empty: not compared. ``mask`` is where ``loss_mask``\n"
    "begins in a batch, or -1.\n\n"
    "Raises:\n"
    "    ValueError: something does not fit; nothing was copied.");

static PyObject *copy_windows(PyObject *module, PyObject *args) {
    Py_buffer source, fields;
    PyObject *batches, *went = NULL;
    long long row_count, steps, length, history, mask, stamps_offset;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*O!LLLLLL:copy_windows", &source, &fields, &PyTuple_Type, &batches, &row_count,
                          &steps, &length, &history, &mask, &stamps_offset)) {
        return NULL;
    }
    const Py_ssize_t count = PyTuple_Size(batches);
    /* The table is copied like the plans are: nothing that was checked changes any more. */
    Field *table = malloc((size_t)fields.len + 1);
    Order *orders = calloc((size_t)count + 1, sizeof(Order));
    if (table == NULL || orders == NULL) {
        PyErr_NoMemory();
    } else if (fields.len % (Py_ssize_t)sizeof(Field)) {
        PyErr_SetString(PyExc_ValueError, "the sizes of the plan's parts disagree");
    } else {
        const Job common = {
            .source = source.buf,
            .source_size = source.len,
            .fields = memcpy(table, fields.buf, (size_t)fields.len),
            .field_count = fields.len / (Py_ssize_t)sizeof(Field),
            .row_count = row_count,
            .steps = steps,
            .length = length,
            .history = history,
            .mask = mask,
            .stamps_offset = stamps_offset,
        };
        Py_ssize_t taken = 0;
        while (taken < count && take(&orders[taken], PyTuple_GetItem(batches, taken), &common) == 0) {
            taken++;
        }
        if (taken == count) {
            went = carried_out(orders, count);
        }
    }
    if (orders != NULL) {
        let_go(orders, count);
    }
    free(table);
    PyBuffer_Release(&source);
    PyBuffer_Release(&fields);
    return went;
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
