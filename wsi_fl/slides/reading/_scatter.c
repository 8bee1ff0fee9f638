/* Parts of a tile to their places in patches, without the interpreter's lock and past the processor's cache.

Rows of a patch lie kilobytes apart, so an ordinary copy waits for memory at every row: the processor fetches each line
before it overwrites it. Streaming stores (SSE2, part of every x86-64) do not fetch; elsewhere memcpy has to do. See
scatter.py for what the arguments mean. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#define LINE 64

static void copy_row(uint8_t *to, const uint8_t *from, size_t n)
{
    size_t head = (size_t)(-(intptr_t)to & (LINE - 1));
    if (head > n)
        head = n;
    memcpy(to, from, head);
    for (to += head, from += head, n -= head; n >= LINE; to += LINE, from += LINE, n -= LINE)
        for (int k = 0; k < LINE; k += 16)
            _mm_stream_si128((__m128i *)(to + k), _mm_loadu_si128((const __m128i *)(from + k)));
    memcpy(to, from, n);
}

static void rows_written(void) { _mm_sfence(); } /* before another thread is told of them */

#else

static void copy_row(uint8_t *to, const uint8_t *from, size_t n) { memcpy(to, from, n); }
static void rows_written(void) {}

#endif

enum { TOP = 1, BOTTOM, LEFT, RIGHT, ROW, COLUMN, N_COLUMNS }; /* column 0 is the patch's number */

static int is_uint8(const Py_buffer *view) { return view->ndim == 3 && view->itemsize == 1; }

static int is_int64(const Py_buffer *view)
{
    return view->ndim == 2 && view->itemsize == sizeof(int64_t) && view->format != NULL
        && (!strcmp(view->format, "l") || !strcmp(view->format, "q"))
        && (uintptr_t)view->buf % sizeof(int64_t) == 0;
}

/* Whether pixels `first` to `end` of a tile's side, put at `at` of a patch's side, lie within both. */
static int along(int64_t first, int64_t end, int64_t tile, int64_t at, int64_t patch)
{
    return 0 <= first && first <= end && end <= tile && 0 <= at && at <= patch && end - first <= patch - at;
}

static int fits(const int64_t *part, const Py_buffer *tile, const Py_buffer *patch)
{
    return is_uint8(patch) && patch->shape[2] == tile->shape[2]
        && along(part[TOP], part[BOTTOM], tile->shape[0], part[ROW], patch->shape[0])
        && along(part[LEFT], part[RIGHT], tile->shape[1], part[COLUMN], patch->shape[1]);
}

static void copy_part(const int64_t *part, const Py_buffer *tile, const Py_buffer *patch)
{
    const size_t pixel = (size_t)tile->shape[2];
    const size_t from_step = (size_t)tile->shape[1] * pixel, to_step = (size_t)patch->shape[1] * pixel;
    const size_t n = (size_t)(part[RIGHT] - part[LEFT]) * pixel;
    const uint8_t *from = (const uint8_t *)tile->buf + (size_t)part[TOP] * from_step + (size_t)part[LEFT] * pixel;
    uint8_t *to = (uint8_t *)patch->buf + (size_t)part[ROW] * to_step + (size_t)part[COLUMN] * pixel;
    for (int64_t row = part[TOP]; row < part[BOTTOM]; row++, from += from_step, to += to_step)
        copy_row(to, from, n);
}

static PyObject *scatter(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tile_of, *parts_of, *given, *patches_of, *done = NULL;
    Py_buffer tile, parts, *patches = NULL;
    Py_ssize_t n, n_held = 0;

    if (!PyArg_ParseTuple(args, "OOO", &tile_of, &parts_of, &given))
        return NULL;
    patches_of = PySequence_Tuple(given); /* which nobody changes meanwhile */
    if (patches_of == NULL)
        return NULL;
    if (PyObject_GetBuffer(tile_of, &tile, PyBUF_ND) < 0) {
        Py_DECREF(patches_of);
        return NULL;
    }
    if (PyObject_GetBuffer(parts_of, &parts, PyBUF_ND | PyBUF_FORMAT) < 0) {
        PyBuffer_Release(&tile);
        Py_DECREF(patches_of);
        return NULL;
    }
    n = PyTuple_GET_SIZE(patches_of);
    if (!is_uint8(&tile) || !is_int64(&parts) || parts.shape[0] != n || parts.shape[1] != N_COLUMNS) {
        PyErr_SetString(PyExc_ValueError, "scatter needs a uint8 tile [h, w, c], int64 parts [n, 7] and n patches");
        goto end;
    }
    patches = PyMem_Calloc((size_t)(n ? n : 1), sizeof *patches);
    if (patches == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (; n_held < n; n_held++) {
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(patches_of, n_held), &patches[n_held], PyBUF_ND | PyBUF_WRITABLE) < 0)
            goto end;
        if (!fits((const int64_t *)parts.buf + n_held * N_COLUMNS, &tile, &patches[n_held])) {
            n_held++;
            PyErr_SetString(PyExc_ValueError, "a part lies beyond its tile or its patch");
            goto end;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t k = 0; k < n; k++)
        copy_part((const int64_t *)parts.buf + k * N_COLUMNS, &tile, &patches[k]);
    rows_written();
    Py_END_ALLOW_THREADS
    done = Py_NewRef(Py_None);
end:
    for (Py_ssize_t k = 0; k < n_held; k++)
        PyBuffer_Release(&patches[k]);
    PyMem_Free(patches);
    PyBuffer_Release(&parts);
    PyBuffer_Release(&tile);
    Py_DECREF(patches_of);
    return done;
}

static PyMethodDef methods[] = {
    {"scatter", scatter, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_scatter", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__scatter(void) { return PyModuleDef_Init(&module); }
