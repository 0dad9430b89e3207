/* A host that does not answer. HANGING names a folder: while it has a file with the name of a user
   or group, lookups of that one wait, and fail while it has a file NAME.fails, with the number in it;
   while it has the file `paths`, opens and stats of what is below its folder `dead` wait. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_there(const char *name, const char *suffix)
{
    char file[4096];
    const char *folder = getenv("HANGING");
    if (!folder)
        return 0;
    snprintf(file, sizeof file, "%s/%s%s", folder, name, suffix);
    return syscall(SYS_faccessat, AT_FDCWD, file, F_OK) == 0;
}

/* Return the number with which lookups of a name fail, 0 if they do not. */
static int failure_of(const char *name)
{
    char text[16] = "";
    char file[4096];
    if (!is_there(name, ".fails"))
        return 0;
    snprintf(file, sizeof file, "%s/%s.fails", getenv("HANGING"), name);
    int descriptor = syscall(SYS_openat, AT_FDCWD, file, O_RDONLY | O_CLOEXEC);
    if (descriptor >= 0) {
        syscall(SYS_read, descriptor, text, sizeof text - 1);
        syscall(SYS_close, descriptor);
    }
    return *text ? atoi(text) : ECONNREFUSED;
}

static void wait_while_there(const char *name)
{
    while (is_there(name, ""))
        usleep(20000);
}

static void wait_for(const char *path)
{
    const char *folder = getenv("HANGING");
    size_t size = folder ? strlen(folder) : 0;
    if (size && path && !strncmp(path, folder, size) && !strncmp(path + size, "/dead/", 6))
        wait_while_there("paths");
}

#define REAL(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))

int getpwnam_r(const char *name, struct passwd *entry, char *buffer, size_t size,
               struct passwd **result)
{
    wait_while_there(name);
    *result = NULL;
    int failure = failure_of(name);
    if (failure)
        return failure;
    return REAL(getpwnam_r)(name, entry, buffer, size, result);
}

int getgrnam_r(const char *name, struct group *entry, char *buffer, size_t size,
               struct group **result)
{
    wait_while_there(name);
    *result = NULL;
    int failure = failure_of(name);
    if (failure)
        return failure;
    return REAL(getgrnam_r)(name, entry, buffer, size, result);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = va_arg(more, mode_t); \
        va_end(more); \
        wait_for(path); \
        return REAL(name)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define LOOK(name, type) \
    int name(const char *path, struct type *found) \
    { \
        wait_for(path); \
        return REAL(name)(path, found); \
    }
LOOK(stat, stat)
LOOK(stat64, stat64)
LOOK(lstat, stat)
LOOK(lstat64, stat64)
LOOK(statvfs, statvfs)
LOOK(statvfs64, statvfs64)
