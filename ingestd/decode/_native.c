/* Locates messages, walks tuples row by row, and parses values of simple types on the way.
 *
 * Numpy does the same column by column (backend_messages.py, tuples.py, cast.py) in three times the
 * time, because it scans the messages once per column and stores the position of each value. Both
 * accept the same values with the same results, bit by bit (tests/unit/decode). A value that numpy
 * refuses is ODD here.
 *
 * Nothing outside the given buffers is read or written, whatever they contain. The loops run
 * without the GIL.
 *
 * Source: PostgreSQL documentation, "Logical Replication Message Formats", TupleData; the texts are
 * those of the types' output functions, see cast.py.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "numbers are written as little-endian machines have them; numpy does without this"
#endif

/* The output format of a column; TEXT outputs positions. As in native_tuples.py. */
enum { TEXT, INTEGER, BOOLEAN, DATE, TIMESTAMP, INSTANT, DECIMAL, KINDS };

/* The state of a value. ODD: a text that the column can't hold. */
enum { PRESENT, ABSENT, UNSENT, ODD };

static const int MOST_COLUMNS = INT16_MAX; /* of a tuple: limit of its counter */

/* As in native.py. Increase it if a function's name, arguments or output change. */
static const int VERSION = 3;

typedef struct {
    int is_wanted;
    int kind;
    int size;             /* bytes of a value in `values` */
    int precision, scale; /* of a decimal */
    uint64_t end;         /* of a decimal: 10 to the power of its precision */
    uint8_t seen;         /* bit n: some value has state n */
    Py_buffer values;     /* of TEXT int64: starts */
    Py_buffer lengths;    /* int64, of TEXT only */
    Py_buffer states;     /* uint8 */
} Column;

static inline int32_t int32_at(const uint8_t *p) {
    return (int32_t)((uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3]);
}

/* --- values --------------------------------------------------------------------------------- */

#define EACH(byte) (UINT64_C(0x0101010101010101) * (byte))

static inline uint64_t eight_at(const uint8_t *p) {
    uint64_t bytes;
    memcpy(&bytes, p, 8);
    return bytes;
}

/* Compare each byte, up to 0x7F. The high bit refuses a byte that carries into the next. */
static inline int are_at_most(uint64_t bytes, uint64_t most) {
    return ((bytes | (bytes + (EACH(0x7F) - most))) & EACH(0x80)) == 0;
}

/* Append 1 to 19 digits, which fit 64 bits, to the number in `out`. Also reads up to seven bytes
 * before them: those in a tuple that precede its first value (walk_rows).
 */
static inline int read_digits(const uint8_t *p, int n, uint64_t *out) {
    static const uint32_t powers[] = {1,      10,      100,      1000,     10000,
                                      100000, 1000000, 10000000, 100000000};
    uint64_t value = *out;
    for (int now = ((n - 1) & 7) + 1; n > 0; n -= now, now = 8) {
        int before = 8 * (8 - now);
        uint64_t digits = (eight_at(p + now - 8) ^ EACH('0')) >> before << before;
        if (!are_at_most(digits, EACH(9))) return 0;
        digits = digits * 10 + (digits >> 8); /* pairs, in every second byte */
        uint64_t outer = (digits & UINT64_C(0xFF000000FF)) * (100 + (UINT64_C(1000000) << 32));
        uint64_t inner = (digits >> 16 & UINT64_C(0xFF000000FF)) * (1 + (UINT64_C(10000) << 32));
        value = value * powers[now] + ((outer + inner) >> 32);
        p += now;
    }
    *out = value;
    return 1;
}

static inline int starts_like_a_number(const uint8_t *p, int n) {
    return n >= 1 && (p[0] != '0' || n == 1);
}

static int read_integer(const uint8_t *p, int n, int size, int64_t *out) {
    int is_negative = n > 0 && p[0] == '-';
    uint64_t value = 0, most = (UINT64_C(1) << (8 * size - 1)) - 1 + (uint64_t)is_negative;
    p += is_negative;
    n -= is_negative;
    if (n > 19 || !starts_like_a_number(p, n) || !read_digits(p, n, &value)) return 0;
    if (value > most || (is_negative && value == 0)) return 0;
    *out = is_negative ? (int64_t)(0 - value) : (int64_t)value;
    return 1;
}

/* A number with exactly `scale` digits after the point: 18 digits, or 19 with a leading zero. */
static int read_decimal(const uint8_t *p, int n, const Column *column, int64_t *out) {
    int is_negative = n > 0 && p[0] == '-', scale = column->scale;
    uint64_t value = 0;
    p += is_negative;
    n -= is_negative;
    int whole = scale ? n - scale - 1 : n;
    if (whole > 19 - scale || !starts_like_a_number(p, whole)) return 0;
    if (!read_digits(p, whole, &value)) return 0;
    if (scale && (p[whole] != '.' || !read_digits(p + whole + 1, scale, &value))) return 0;
    if (value >= column->end || (is_negative && value == 0)) return 0;
    *out = is_negative ? -(int64_t)value : (int64_t)value;
    return 1;
}

/* YYYY-MM-DD in the years 1 to 9999, as days since 1970. */
static int read_day(const uint8_t *p, int64_t *out) {
    static const uint8_t days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    uint64_t month_of = eight_at(p) ^ UINT64_C(0x2D30302D30303030); /* 0000-00- */
    uint64_t day_of = eight_at(p + 2) ^ UINT64_C(0x30302D30302D3030); /* 00-00-00 */
    if (!are_at_most(month_of, UINT64_C(0x0009090009090909))) return 0;
    if (!are_at_most(day_of, UINT64_C(0x0909000909000909))) return 0;
    month_of = month_of * 10 + (month_of >> 8);
    day_of = day_of * 10 + (day_of >> 8);
    int year = 100 * (int)(month_of & 0xFF) + (int)(month_of >> 16 & 0xFF);
    int month = (int)(month_of >> 40 & 0xFF), day = (int)(day_of >> 48 & 0xFF);
    if (year < 1 || month < 1 || month > 12 || day < 1) return 0;
    int is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    if (day > days[month - 1] + (month == 2 && is_leap)) return 0;
    /* Years begin in March here, so that the leap day is the last day. */
    int from_march = month > 2 ? month - 3 : month + 9, y = year - (month <= 2);
    int day_of_year = (153 * from_march + 2) / 5 + day - 1;
    *out = 365 * (int64_t)y + y / 4 - y / 100 + y / 400 + day_of_year - 719468;
    return 1;
}

/* YYYY-MM-DD HH:MM:SS[.ffffff], the fraction without trailing zeros, as us since 1970. */
static int read_timestamp(const uint8_t *p, int n, int64_t *out) {
    static const int32_t units[] = {100000, 10000, 1000, 100, 10, 1};
    int64_t day;
    if (n < 19 || n == 20 || n > 26 || p[10] != ' ' || !read_day(p, &day)) return 0;
    uint64_t clock = eight_at(p + 11) ^ UINT64_C(0x30303A30303A3030); /* 00:00:00 */
    if (!are_at_most(clock, UINT64_C(0x0909000909000909))) return 0;
    clock = clock * 10 + (clock >> 8);
    int hour = (int)(clock & 0xFF), minute = (int)(clock >> 24 & 0xFF);
    int second = (int)(clock >> 48 & 0xFF);
    if (hour > 23 || minute > 59 || second > 59) return 0;
    uint64_t fraction = 0;
    if (n > 19) {
        int digits = n - 20;
        if (p[19] != '.' || p[n - 1] == '0' || !read_digits(p + 20, digits, &fraction)) return 0;
        fraction *= (uint64_t)units[digits - 1];
    }
    *out = ((day * 24 + hour) * 60 + minute) * 60 + second;
    *out = *out * 1000000 + (int64_t)fraction;
    return 1;
}

static int read_instant(const uint8_t *p, int n, int64_t *out) {
    return n > 3 && memcmp(p + n - 3, "+00", 3) == 0 && read_timestamp(p, n - 3, out);
}

static int read_number(const Column *column, const uint8_t *p, int n, int64_t *out) {
    switch (column->kind) {
    case INTEGER: return read_integer(p, n, column->size, out);
    case DATE: return n == 10 && read_day(p, out);
    case TIMESTAMP: return read_timestamp(p, n, out);
    case INSTANT: return read_instant(p, n, out);
    case DECIMAL: return read_decimal(p, n, column, out);
    default: /* BOOLEAN */
        *out = n == 1 && p[0] == 't';
        return n == 1 && (p[0] == 't' || p[0] == 'f');
    }
}

static void store(Column *column, Py_ssize_t row, int64_t number) {
    char *to = (char *)column->values.buf + row * column->size;
    int64_t sign = number >> 63;
    switch (column->size) { /* the lowest bytes of a number come first */
    case 1: memcpy(to, &number, 1); break;
    case 2: memcpy(to, &number, 2); break;
    case 4: memcpy(to, &number, 4); break;
    case 8: memcpy(to, &number, 8); break;
    default:
        memcpy(to, &number, 8);
        memcpy(to + 8, &sign, 8);
    }
}

/* --- tuples --------------------------------------------------------------------------------- */

static inline void take(Column *column, Py_ssize_t row, const uint8_t *data, int64_t at, int32_t n,
                        uint8_t state) {
    if (column->kind == TEXT) {
        ((int64_t *)column->values.buf)[row] = at;
        ((int64_t *)column->lengths.buf)[row] = n;
    } else {
        int64_t number = 0;
        if (state == PRESENT && !read_number(column, data + at, n, &number)) {
            state = ODD;
            number = 0;
        }
        store(column, row, number);
    }
    ((uint8_t *)column->states.buf)[row] = state;
    column->seen |= (uint8_t)(1 << state);
}

/* Return the first malformed row, or -1. */
static Py_ssize_t walk_rows(const uint8_t *data, int64_t size, const int64_t *at,
                            const int64_t *ends, int64_t *stops, Py_ssize_t rows, Column *columns,
                            int count) {
    for (Py_ssize_t row = 0; row < rows; row++) {
        int64_t p = at[row], end = ends[row];
        if (p < 0 || end > size || end < p || end - p < 2) return row;
        if ((data[p] << 8 | data[p + 1]) != count) return row;
        p += 2;
        for (int c = 0; c < count; c++) {
            int32_t n = 0;
            uint8_t state = PRESENT;
            if (p >= end) return row;
            switch (data[p]) {
            case 't':
                if (end - p < 5 || (n = int32_at(data + p + 1)) < 0 || n > end - p - 5) return row;
                p += 5;
                break;
            case 'n':
                state = ABSENT;
                p += 1;
                break;
            case 'u':
                state = UNSENT;
                p += 1;
                break;
            default: return row;
            }
            if (columns[c].is_wanted) take(&columns[c], row, data, p, n, state);
            p += n;
        }
        stops[row] = p;
    }
    return -1;
}

/* --- arguments ------------------------------------------------------------------------------ */

static int has_items(const Py_buffer *view, Py_ssize_t items, Py_ssize_t size) {
    return view->len / size >= items;
}

static int set_column(Column *column, PyObject *given, Py_ssize_t rows) {
    PyObject *values, *lengths, *states;
    if (given == Py_None) return 1;
    if (!PyArg_ParseTuple(given, "iiiiOOO", &column->kind, &column->size, &column->precision,
                          &column->scale, &values, &lengths, &states))
        return 0;
    int size = column->size, digits = column->precision, scale = column->scale;
    int is_sized = size == 1 || size == 2 || size == 4 || size == 8 || size == 16;
    int is_decimal = size == 16 && digits >= 1 && digits <= 18 && scale >= 0 && scale <= digits;
    if (column->kind < TEXT || column->kind >= KINDS || !is_sized ||
        (column->kind == INTEGER && size > 8) || (column->kind == TEXT && size != 8) ||
        (column->kind == DECIMAL && !is_decimal)) {
        PyErr_SetString(PyExc_ValueError, "no such column");
        return 0;
    }
    if (PyObject_GetBuffer(values, &column->values, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(states, &column->states, PyBUF_WRITABLE) < 0)
        return 0;
    if (column->kind == TEXT && PyObject_GetBuffer(lengths, &column->lengths, PyBUF_WRITABLE) < 0)
        return 0;
    if (!has_items(&column->values, rows, size) || !has_items(&column->states, rows, 1) ||
        (column->kind == TEXT && !has_items(&column->lengths, rows, 8))) {
        PyErr_SetString(PyExc_ValueError, "arrays shorter than there are rows");
        return 0;
    }
    column->end = 1;
    for (int i = 0; column->kind == DECIMAL && i < digits; i++) column->end *= 10;
    column->is_wanted = 1;
    return 1;
}

static PyObject *seen_of(const Column *columns, int count) {
    PyObject *seen = PyBytes_FromStringAndSize(NULL, count);
    if (seen != NULL) {
        char *to = PyBytes_AsString(seen);
        for (int c = 0; c < count; c++) to[c] = (char)columns[c].seen;
    }
    return seen;
}

PyDoc_STRVAR(walk_doc,
             "walk(buffer, at, ends, stops, columns) -> (row, seen)\n\n"
             "Walk the tuple that begins at each of `at` and ends at or before `ends` (int64);\n"
             "`stops` (int64, output) is where it stops. `columns` has for each column None, or\n"
             "(kind, bytes per value, precision, scale, values, lengths, states): writable\n"
             "arrays, `lengths` only for TEXT. Return the first malformed row, or -1, and for\n"
             "each column a byte in which bit n is set if a value had state n.");

static PyObject *walk(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer buffer, at, ends, stops;
    PyObject *given, *found = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*w*O!", &buffer, &at, &ends, &stops, &PyList_Type, &given))
        return NULL;
    Py_ssize_t rows = at.len / 8, count = PyList_Size(given), malformed;
    Column *columns = NULL;
    if (count > MOST_COLUMNS || !has_items(&ends, rows, 8) || !has_items(&stops, rows, 8)) {
        PyErr_SetString(PyExc_ValueError, "too many columns, or arrays of different lengths");
        goto done;
    }
    columns = PyMem_Calloc((size_t)count + 1, sizeof(Column));
    if (columns == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t c = 0; c < count; c++)
        if (!set_column(&columns[c], PyList_GetItem(given, c), rows)) goto done;
    Py_BEGIN_ALLOW_THREADS;
    malformed = walk_rows(buffer.buf, buffer.len, at.buf, ends.buf, stops.buf, rows, columns,
                          (int)count);
    Py_END_ALLOW_THREADS;
    found = Py_BuildValue("nN", malformed, seen_of(columns, (int)count));
done:
    for (Py_ssize_t c = 0; columns != NULL && c < count; c++) {
        PyBuffer_Release(&columns[c].values);
        PyBuffer_Release(&columns[c].lengths);
        PyBuffer_Release(&columns[c].states);
    }
    PyMem_Free(columns);
    PyBuffer_Release(&buffer);
    PyBuffer_Release(&at);
    PyBuffer_Release(&ends);
    PyBuffer_Release(&stops);
    return found;
}

static int gather_rows(const char *data, int64_t size, const int64_t *starts,
                       const int64_t *lengths, Py_ssize_t rows, int32_t *offsets, char *to,
                       int64_t most) {
    int64_t used = 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        int64_t at = starts[row], n = lengths[row];
        offsets[row] = (int32_t)used;
        if (n == 0) continue;
        if (n < 0 || n > most - used) return 0;
        if (at < 0 || at > size || n > size - at) return 0;
        int64_t room = size - at < most - used ? size - at : most - used;
        if (n <= 16 && room >= 16) /* including the bytes after it: faster than a variable size */
            memcpy(to + used, data + at, 16);
        else if (n <= 32 && room >= 32)
            memcpy(to + used, data + at, 32);
        else if (n <= 64 && room >= 64)
            memcpy(to + used, data + at, 64);
        else
            memcpy(to + used, data + at, (size_t)n);
        used += n;
    }
    offsets[rows] = (int32_t)used;
    return 1;
}

PyDoc_STRVAR(gather_doc,
             "gather(buffer, starts, lengths, offsets, to)\n\n"
             "Copy `lengths` bytes from each of `starts` (int64) to `to`, back to back; `offsets`\n"
             "(int32, output, one more item) is where each begins there. Raise ValueError if one\n"
             "lies outside the buffer, or `to` is too small.");

static PyObject *gather(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer buffer, starts, lengths, offsets, to;
    int is_done = 0;
    if (!PyArg_ParseTuple(args, "y*y*y*w*w*", &buffer, &starts, &lengths, &offsets, &to))
        return NULL;
    Py_ssize_t rows = starts.len / 8;
    if (to.len <= INT32_MAX && has_items(&lengths, rows, 8) && has_items(&offsets, rows + 1, 4)) {
        Py_BEGIN_ALLOW_THREADS;
        is_done = gather_rows(buffer.buf, buffer.len, starts.buf, lengths.buf, rows, offsets.buf,
                              to.buf, to.len);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&buffer);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&to);
    if (is_done) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "values outside their buffer, or arrays too short for them");
    return NULL;
}

static inline uint8_t nibble_of(uint8_t digit) {
    uint8_t number = (uint8_t)(digit - '0'), letter = (uint8_t)(digit - 'a');
    return number < 10 ? number : letter < 6 ? (uint8_t)(letter + 10) : 0xF0;
}

static int unhex_rows(const uint8_t *data, int64_t size, const int64_t *starts,
                      const int64_t *lengths, Py_ssize_t rows, int32_t *offsets, uint8_t *odd,
                      uint8_t *to, int64_t most) {
    int64_t used = 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        int64_t at = starts[row], n = lengths[row];
        offsets[row] = (int32_t)used;
        if (n != 0 && (at < 0 || at > size || n < 0 || n > size - at)) return 0;
        odd[row] = n < 2 || n % 2 != 0 || data[at] != '\\' || data[at + 1] != 'x';
        if (odd[row]) continue;
        int64_t count = n / 2 - 1;
        if (count > most - used) return 0;
        const uint8_t *digits = data + at + 2;
        uint8_t wrong = 0;
        for (int64_t i = 0; i < count; i++) {
            uint8_t high = nibble_of(digits[2 * i]), low = nibble_of(digits[2 * i + 1]);
            wrong |= high | low;
            to[used + i] = (uint8_t)(high << 4 | low);
        }
        odd[row] = wrong > 15;
        if (!odd[row]) used += count;
    }
    offsets[rows] = (int32_t)used;
    return 1;
}

PyDoc_STRVAR(unhex_doc,
             "unhex(buffer, starts, lengths, offsets, odd, to)\n\n"
             "Write the decoded bytes of bytea texts to `to`, back to back, as gather does. For\n"
             "an invalid text nothing is written, and `odd` (uint8) is 1.");

static PyObject *unhex(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer buffer, starts, lengths, offsets, odd, to;
    int is_done = 0;
    if (!PyArg_ParseTuple(args, "y*y*y*w*w*w*", &buffer, &starts, &lengths, &offsets, &odd, &to))
        return NULL;
    Py_ssize_t rows = starts.len / 8;
    if (to.len <= INT32_MAX && has_items(&lengths, rows, 8) && has_items(&offsets, rows + 1, 4) &&
        has_items(&odd, rows, 1)) {
        Py_BEGIN_ALLOW_THREADS;
        is_done = unhex_rows(buffer.buf, buffer.len, starts.buf, lengths.buf, rows, offsets.buf,
                             odd.buf, to.buf, to.len);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&buffer);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&odd);
    PyBuffer_Release(&to);
    if (is_done) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "values outside their buffer, or arrays too short for them");
    return NULL;
}

static Py_ssize_t follow_messages(const uint8_t *data, int64_t size, int64_t at, int64_t *starts,
                                  int64_t *ends, Py_ssize_t room) {
    Py_ssize_t found = 0;
    if (at < 0) return 0;
    while (found < room && size - at >= 5 && data[at] == 'd') {
        int32_t length = int32_at(data + at + 1); /* of itself and the content */
        if (length < 4 || length > size - at - 1) break;
        starts[found] = at + 5;
        at += 1 + (int64_t)length;
        ends[found++] = at;
    }
    return found;
}

PyDoc_STRVAR(follow_doc,
             "follow(buffer, at, starts, ends) -> found\n\n"
             "Find consecutive complete CopyData messages from `at` on, at most as many as fit in\n"
             "`starts` and `ends` (int64, output): the bounds of their contents.");

static PyObject *follow(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer buffer, starts, ends;
    Py_ssize_t at, found = 0;
    if (!PyArg_ParseTuple(args, "y*nw*w*", &buffer, &at, &starts, &ends)) return NULL;
    Py_ssize_t room = (starts.len < ends.len ? starts.len : ends.len) / 8;
    Py_BEGIN_ALLOW_THREADS;
    found = follow_messages(buffer.buf, buffer.len, at, starts.buf, ends.buf, room);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&buffer);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&ends);
    return PyLong_FromSsize_t(found);
}

static void read_words(const uint8_t *data, int64_t size, const int64_t *offsets, Py_ssize_t count,
                       int64_t *words) {
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t at = offsets[i];
        uint8_t last[8] = {0};
        const uint8_t *p = last;
        if (at >= 0 && at <= size - 8)
            p = data + at;
        else if (at >= 0 && at < size)
            memcpy(last, data + at, (size_t)(size - at));
        words[i] = (int64_t)((uint64_t)(uint32_t)int32_at(p) << 32 | (uint32_t)int32_at(p + 4));
    }
}

PyDoc_STRVAR(words_doc,
             "words(buffer, offsets, words)\n\n"
             "Write the big-endian eight-byte number at each of `offsets` (int64) to `words`\n"
             "(int64); zeros follow the buffer's last byte.");

static PyObject *words(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer buffer, offsets, to;
    if (!PyArg_ParseTuple(args, "y*y*w*", &buffer, &offsets, &to)) return NULL;
    int is_done = has_items(&to, offsets.len / 8, 8);
    if (is_done) {
        Py_BEGIN_ALLOW_THREADS;
        read_words(buffer.buf, buffer.len, offsets.buf, offsets.len / 8, to.buf);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&buffer);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&to);
    if (is_done) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "an array too short for the words");
    return NULL;
}

static PyMethodDef methods[] = {
    {"follow", follow, METH_VARARGS, follow_doc},
    {"walk", walk, METH_VARARGS, walk_doc},
    {"gather", gather, METH_VARARGS, gather_doc},
    {"unhex", unhex, METH_VARARGS, unhex_doc},
    {"words", words, METH_VARARGS, words_doc},
    {NULL, NULL, 0, NULL},
};

static int set_version(PyObject *module) {
    return PyModule_AddIntConstant(module, "VERSION", VERSION);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, set_version}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
