// Logs one line when a mapped file was truncated or its disk fails: reading such a page raises SIGBUS, which
// ends the process. The handler may only call functions that POSIX lists as async-signal-safe.

#define _XOPEN_SOURCE 700

#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    char text[9216];  // enough for a path of 4,096 letters that all need an escape
    size_t length;
} Line;

static void add(Line *line, char one) {
    if (line->length < sizeof line->text) line->text[line->length++] = one;
}

static void add_text(Line *line, const char *text) {
    while (*text) add(line, *text++);
}

// Escapes text for a JSON string; Linux writes the end of a line in a path as \012.
static void add_escaped(Line *line, const char *text) {
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') add(line, '\\');
        add(line, (unsigned char)*text < ' ' ? '?' : *text);
    }
}

static void add_number(Line *line, int64_t number, int digits) {
    if (digits > 1) add_number(line, number / 10, digits - 1);
    add(line, (char)('0' + number % 10));
}

// Adds the time in the format of Python's log lines. Days to a date: Hinnant, "chrono-Compatible Low-Level
// Date Algorithms".
static void add_time(Line *line) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const int64_t days = now.tv_sec / 86400 + 719468, second = now.tv_sec % 86400, era = days / 146097;
    const int64_t of_era = days % 146097;
    const int64_t year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
    const int64_t of_year = of_era - (365 * year + year / 4 - year / 100), shifted = (5 * of_year + 2) / 153;
    const int64_t month = shifted < 10 ? shifted + 3 : shifted - 9;
    const int64_t parts[] = {year + era * 400 + (month < 3), month, of_year - (153 * shifted + 2) / 5 + 1,
                             second / 3600, second / 60 % 60, second % 60, now.tv_nsec / 1000000};
    const char *ends[] = {"-", "-", "T", ":", ":", ".", "+00:00"};
    for (int i = 0; i < 7; i++) {
        add_number(line, parts[i], i == 0 ? 4 : i == 6 ? 3 : 2);
        add_text(line, ends[i]);
    }
}

static uint64_t hexadecimal(const char **at) {
    uint64_t number = 0;
    for (;; (*at)++) {
        const char one = **at;
        if (one >= '0' && one <= '9') number = number * 16 + (uint64_t)(one - '0');
        else if (one >= 'a' && one <= 'f') number = number * 16 + (uint64_t)(one - 'a' + 10);
        else return number;
    }
}

// Adds the path of the file mapped at an address, from a row of /proc/self/maps:
// begin-end permissions offset device inode path.
static int add_path(Line *line, const char *row, uint64_t address) {
    const uint64_t begin = hexadecimal(&row);
    row++;
    if (address < begin || address >= hexadecimal(&row)) return 0;
    const char *path = strchr(row, '/');
    add_escaped(line, path ? path : "a mapped file");
    return 1;
}

static void add_file(Line *line, uint64_t address) {
    char row[4096];
    size_t length = 0;
    const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    for (char one; maps >= 0 && read(maps, &one, 1) == 1;) {
        if (one != '\n' && length < sizeof row - 1) row[length++] = one;
        if (one != '\n') continue;
        row[length] = 0, length = 0;
        if (add_path(line, row, address)) return;
    }
    add_text(line, "a mapped file");
}

static void on_lost_page(int number, siginfo_t *info, void *context) {
    (void)context;
    static atomic_flag taken = ATOMIC_FLAG_INIT;
    if (atomic_flag_test_and_set(&taken))
        for (;;) pause();  // another thread writes the line and ends the process
    Line line;
    line.length = 0;
    add_text(&line, "{\"time\": \"");
    add_time(&line);
    add_text(&line, "\", \"level\": \"critical\", \"logger\": \"specops\", \"message\": \"ending: ");
    add_file(&line, (uint64_t)(uintptr_t)info->si_addr);
    add_text(&line, " has become shorter while it is in use, or its disk fails\"}");
    add(&line, '\n');
    (void)!write(STDERR_FILENO, line.text, line.length);
    signal(number, SIG_DFL);  // the same instruction again ends the process
}

// Lets the process write the line; returns 0, or -1 if the system refuses.
int specops_report_lost_pages(void) {
    struct sigaction action = {.sa_sigaction = on_lost_page, .sa_flags = SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, NULL);
}
