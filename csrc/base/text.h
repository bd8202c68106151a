/*
 * base/text: one-line messages in fixed buffers; private to base/.
 * Guarantees: what is left is one line and no UTF-8 sequence is cut in half at its end.
 * Never allocates.
 */
#ifndef MS_BASE_TEXT_H
#define MS_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

/* Tidies `text` of `n` bytes (without the final zero). `cut`: it was longer and its end was lost. */
static inline size_t ms_text_one_line(char * text, size_t n, bool cut) {
    if (cut) {
        size_t lead = n;
        while (lead > 0 && ((unsigned char) text[lead - 1] & 0xc0) == 0x80) {
            lead--; /* continuation bytes */
        }
        if (lead > 0) {
            unsigned char c = (unsigned char) text[lead - 1];
            size_t whole = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
            if (n - (lead - 1) < whole) {
                n = lead - 1;
            }
        }
    }
    for (size_t i = 0; i < n; i++) {
        if ((unsigned char) text[i] < 0x20 || text[i] == 0x7f) {
            text[i] = ' ';
        }
    }
    while (n > 0 && text[n - 1] == ' ') {
        n--;
    }
    text[n] = '\0';
    return n;
}

#endif
