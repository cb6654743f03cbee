/* The loops of _native.c, alone, under AddressSanitizer and UndefinedBehaviorSanitizer.
 *
 *     native_driver INPUTS SEED
 *
 * Each input is a buffer of its exact size on the heap, made by a grammar of tuples, messages and
 * values and then damaged, with arrays of offsets that are right, a little wrong, or anything. What
 * is written is checked as well: positions inside their buffer, copies that equal what they are of.
 * A finding ends the process with a report; the seed and the number repeat it.
 */
#define PyMODINIT_FUNC static PyObject *
#include "_native.c"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t state;

static uint64_t any(void) { /* xorshift64* */
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * UINT64_C(2685821657736338717);
}

static uint64_t below(uint64_t most) { return any() % most; }
static int one_in(uint64_t n) { return below(n) == 0; }

static void demand(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "FOUND: %s\n", what);
    abort();
}

enum { MOST = 4096, ROWS = 12, COLUMNS = 10 };

static uint8_t made[MOST + 64];
static int64_t used;

static void put(const void *bytes, size_t n) {
    if (used + (int64_t)n > MOST) n = (size_t)(MOST - used);
    memcpy(made + used, bytes, n);
    used += (int64_t)n;
}

static void put_byte(uint8_t byte) { put(&byte, 1); }

static void put_number(uint64_t number, int bytes) {
    while (bytes-- > 0) put_byte((uint8_t)(number >> (8 * bytes)));
}

static int64_t odd_number(void) {
    static const int64_t odd[] = {INT64_MIN, INT64_MAX, INT64_MIN + 1, INT64_MAX - 7, -1, -8,
                                  INT32_MIN, INT32_MAX, UINT32_MAX,    0,             1,  7};
    if (one_in(3)) return (int64_t)any();
    return (int64_t)((uint64_t)odd[below(sizeof odd / sizeof *odd)] + below(3) - 1);
}

/* --- values ---------------------------------------------------------------------------------- */

static int value_of(int kind, char *to, int precision, int scale) {
    char text[96];
    int n = 0;
    int year = one_in(4) ? (int)below(12000) : 1900 + (int)below(200);
    switch (kind) {
    case INTEGER:
        n = snprintf(text, sizeof text, "%" PRId64,
                     one_in(2) ? odd_number() : (int64_t)any() >> below(64));
        if (one_in(8)) n = snprintf(text, sizeof text, "%s%" PRIu64, one_in(2) ? "-" : "0", any());
        break;
    case BOOLEAN: n = snprintf(text, sizeof text, "%s", one_in(2) ? "t" : one_in(4) ? "x" : "f"); break;
    case DATE:
        n = snprintf(text, sizeof text, "%04d-%02d-%02d", year, (int)below(14), (int)below(33));
        break;
    case TIMESTAMP:
    case INSTANT:
        n = snprintf(text, sizeof text, "%04d-%02d-%02d %02d:%02d:%02d", year, (int)below(14),
                     (int)below(33), (int)below(26), (int)below(62), (int)below(62));
        if (one_in(2)) n += snprintf(text + n, sizeof text - (size_t)n, ".%0*u", 1 + (int)below(7),
                                     (unsigned)below(1000000));
        if (kind == INSTANT) n += snprintf(text + n, sizeof text - (size_t)n, one_in(9) ? "+01" : "+00");
        break;
    case DECIMAL:
        n = snprintf(text, sizeof text, "%s%" PRIu64, one_in(3) ? "-" : "", any() >> below(64));
        if (n > 2 + precision && one_in(2)) n = 2 + precision;
        if (scale && !one_in(9)) {
            text[n++] = '.';
            for (int i = 0; i < scale; i++) text[n++] = (char)('0' + below(10));
        }
        break;
    default:
        n = (int)below(80);
        for (int i = 0; i < n; i++) text[i] = (char)any();
        if (one_in(2) && n >= 2) {
            memcpy(text, "\\x", 2);
            for (int i = 2; i < n; i++) text[i] = "0123456789abcdef"[below(16)];
        }
    }
    if (n > (int)sizeof text) n = sizeof text;
    for (int i = 0; n > 0 && i < 2; i++)
        if (one_in(12)) text[below((uint64_t)n)] = one_in(2) ? (char)any() : "0123456789-:. +\\"[below(16)];
    if (n > 0 && one_in(16)) n = (int)below((uint64_t)n);
    memcpy(to, text, (size_t)n);
    return n;
}

static uint8_t *copied(void) {
    for (int i = 0; used > 0 && i < 3; i++)
        if (one_in(10)) made[below((uint64_t)used)] = (uint8_t)any();
    if (used > 0 && one_in(10)) used = (int64_t)below((uint64_t)used);
    uint8_t *data = malloc((size_t)used + (used == 0));
    if (data == NULL) abort();
    memcpy(data, made, (size_t)used);
    return data;
}

static int64_t bent(int64_t offset) {
    if (one_in(40)) return odd_number();
    if (one_in(20)) return (int64_t)((uint64_t)offset + below(9) - 4);
    return offset;
}

static void *room_for(size_t items, size_t size) {
    void *found = malloc(items * size + (items == 0));
    if (found == NULL) abort();
    memset(found, 0xA5, items * size);
    return found;
}

/* --- the loops ------------------------------------------------------------------------------- */

static void walk_one(void) {
    static const int sizes[] = {1, 2, 4, 8};
    Column columns[COLUMNS + 1] = {0};
    int count = (int)below(COLUMNS + 1), rows = (int)below(ROWS + 1);
    for (int c = 0; c < count; c++) {
        Column *column = &columns[c];
        column->kind = (int)below(KINDS);
        column->is_wanted = !one_in(5);
        column->size = column->kind == DECIMAL ? 16 : column->kind == TEXT ? 8 : sizes[below(4)];
        column->precision = 1 + (int)below(18);
        column->scale = (int)below((uint64_t)column->precision + 1);
        column->end = 1;
        for (int i = 0; i < column->precision; i++) column->end *= 10;
        column->values.buf = room_for((size_t)rows, (size_t)column->size);
        column->states.buf = room_for((size_t)rows, 1);
        column->lengths.buf = room_for((size_t)rows, 8);
    }
    int64_t *at = room_for((size_t)rows, 8), *ends = room_for((size_t)rows, 8);
    int64_t *stops = room_for((size_t)rows, 8);
    used = 0;
    for (int row = 0; row < rows; row++) {
        if (one_in(4)) put_number(any(), 3);
        at[row] = used;
        put_number((uint64_t)(one_in(60) ? (int)below(9) : count), 2);
        for (int c = 0; c < count; c++) {
            char text[128];
            if (one_in(6)) {
                put_byte(one_in(40) ? (uint8_t)any() : one_in(2) ? 'n' : 'u');
                continue;
            }
            int n = value_of(columns[c].kind, text, columns[c].precision, columns[c].scale);
            put_byte('t');
            put_number((uint64_t)(one_in(80) ? odd_number() : n), 4);
            put(text, (size_t)n);
        }
        ends[row] = used;
    }
    uint8_t *data = copied();
    for (int row = 0; row < rows; row++) {
        at[row] = bent(at[row]);
        ends[row] = bent(ends[row]);
    }
    Py_ssize_t wrong = walk_rows(data, used, at, ends, stops, rows, columns, count);
    demand(wrong >= -1 && wrong < rows, "a row that there is not");
    for (Py_ssize_t row = 0; row < (wrong < 0 ? rows : wrong); row++) {
        demand(stops[row] >= at[row] + 2 && stops[row] <= ends[row], "a stop outside its tuple");
        for (int c = 0; c < count; c++) {
            if (!columns[c].is_wanted) continue;
            demand(((uint8_t *)columns[c].states.buf)[row] <= ODD, "no state");
            if (columns[c].kind != TEXT) continue;
            int64_t begin = ((int64_t *)columns[c].values.buf)[row];
            int64_t n = ((int64_t *)columns[c].lengths.buf)[row];
            demand(begin >= 0 && n >= 0 && begin + n <= used, "a text outside its buffer");
        }
    }
    for (int c = 0; c < count; c++) {
        free(columns[c].values.buf);
        free(columns[c].states.buf);
        free(columns[c].lengths.buf);
    }
    free(at), free(ends), free(stops), free(data);
}

static void copy_one(int is_hex) {
    int rows = (int)below(ROWS + 1);
    int64_t *starts = room_for((size_t)rows, 8), *lengths = room_for((size_t)rows, 8);
    int32_t *offsets = room_for((size_t)rows + 1, 4);
    uint8_t *odd = room_for((size_t)rows, 1);
    int64_t all = 0;
    used = 0;
    for (int row = 0; row < rows; row++) {
        char text[128];
        int n = value_of(TEXT, text, 0, 0);
        starts[row] = used;
        lengths[row] = one_in(9) ? 0 : n;
        put(text, (size_t)n);
        all += lengths[row];
    }
    uint8_t *data = copied();
    for (int row = 0; row < rows; row++) {
        starts[row] = bent(starts[row]);
        lengths[row] = bent(lengths[row]);
    }
    int64_t most = one_in(6) ? (int64_t)below((uint64_t)all + 1) : all + (int64_t)below(3);
    uint8_t *to = room_for((size_t)most, 1);
    int is_done = is_hex ? unhex_rows(data, used, starts, lengths, rows, offsets, odd, to, most)
                         : gather_rows((char *)data, used, starts, lengths, rows, offsets,
                                       (char *)to, most);
    for (int row = 0; is_done && row < rows; row++) {
        demand(offsets[row] >= 0 && offsets[row] <= offsets[row + 1], "offsets that go back");
        demand(offsets[row + 1] <= most, "an offset outside its buffer");
        if (!is_hex)
            demand(memcmp(to + offsets[row], data + (lengths[row] ? starts[row] : 0),
                          (size_t)lengths[row]) == 0,
                   "another value than was to be copied");
    }
    free(starts), free(lengths), free(offsets), free(odd), free(data), free(to);
}

static void follow_one(void) {
    int count = (int)below(ROWS + 1);
    used = 0;
    if (one_in(4)) put_number(any(), 2);
    int64_t first = used;
    for (int i = 0; i < count; i++) {
        int64_t n = (int64_t)below(40);
        put_byte(one_in(60) ? (uint8_t)any() : 'd');
        put_number((uint64_t)(one_in(60) ? odd_number() : n + 4), 4);
        while (n-- > 0) put_byte((uint8_t)any());
    }
    uint8_t *data = copied();
    Py_ssize_t room = (Py_ssize_t)below(ROWS + 2);
    int64_t *starts = room_for((size_t)room, 8), *ends = room_for((size_t)room, 8);
    Py_ssize_t found = follow_messages(data, used, bent(first), starts, ends, room);
    demand(found >= 0 && found <= room, "more messages than there is room for");
    for (Py_ssize_t i = 0; i < found; i++)
        demand(starts[i] >= 5 && starts[i] <= ends[i] && ends[i] <= used, "a message outside");
    free(data), free(starts), free(ends);
}

static void words_one(void) {
    used = 0;
    int64_t n = (int64_t)below(24);
    while (n-- > 0) put_byte((uint8_t)any());
    uint8_t *data = copied();
    Py_ssize_t count = (Py_ssize_t)below(ROWS + 1);
    int64_t *offsets = room_for((size_t)count, 8), *words = room_for((size_t)count, 8);
    for (Py_ssize_t i = 0; i < count; i++) offsets[i] = bent((int64_t)below((uint64_t)used + 2));
    read_words(data, used, offsets, count, words);
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t wanted = 0;
        for (int64_t k = 0; k < 8; k++) {
            int64_t offset = offsets[i];
            int is_there = offset >= 0 && offset < used && k < used - offset;
            wanted = wanted << 8 | (is_there ? data[offset + k] : 0);
        }
        demand((uint64_t)words[i] == wanted, "another word");
    }
    free(data), free(offsets), free(words);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    uint64_t inputs = strtoull(argv[1], NULL, 10), seed = strtoull(argv[2], NULL, 10);
    for (uint64_t i = 0; i < inputs; i++) {
        state = (seed + 1) * UINT64_C(0x9E3779B97F4A7C15) ^ (i + 1) * UINT64_C(0xBF58476D1CE4E5B9);
        if (state == 0) state = 1;
        switch (below(8)) {
        case 0: copy_one(0); break;
        case 1: copy_one(1); break;
        case 2: follow_one(); break;
        case 3: words_one(); break;
        default: walk_one();
        }
        if ((i + 1) % 10000000 == 0) {
            printf("%" PRIu64 " inputs\n", i + 1);
            fflush(stdout);
        }
    }
    printf("%" PRIu64 " inputs of seed %" PRIu64 ", nothing found\n", inputs, seed);
    return 0;
}
