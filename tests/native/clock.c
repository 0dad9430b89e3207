/* A wall clock that is set by a file: CLOCK_OFFSET names it, seconds stand in it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static int (*real)(clockid_t, struct timespec *);

int clock_gettime(clockid_t which, struct timespec *now)
{
    if (!real)
        real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(which, now);
    const char *path = getenv("CLOCK_OFFSET");
    if (status == 0 && which == CLOCK_REALTIME && path) {
        FILE *file = fopen(path, "r");
        long offset = 0;
        if (file) {
            if (fscanf(file, "%ld", &offset) != 1)
                offset = 0;
            fclose(file);
        }
        now->tv_sec += offset;
    }
    return status;
}
