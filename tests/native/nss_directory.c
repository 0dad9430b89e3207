/* A source of the name service that asks a directory: user team-ldap (5000), groups ldap-a (5001)
   and ldap-b (5002), of which team-ldap and daemon are members. DIRECTORY names a folder: while it
   has a file `down`, the directory does not answer, with the error number in that file; while it
   has a file `empty`, it knows nobody. */
#include <errno.h>
#include <grp.h>
#include <nss.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE *file(const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("DIRECTORY"), name);
    return fopen(path, "r");
}

static enum nss_status answer(int is_known, int *error)
{
    FILE *down = file("down"), *empty = file("empty");
    enum nss_status status = is_known && !empty ? NSS_STATUS_SUCCESS : NSS_STATUS_NOTFOUND;
    *error = ENOENT;
    if (empty)
        fclose(empty);
    if (down) {
        if (fscanf(down, "%d", error) != 1)
            abort();
        fclose(down);
        status = NSS_STATUS_UNAVAIL;
    }
    return status;
}

enum nss_status _nss_directory_getpwnam_r(const char *name, struct passwd *entry, char *buffer,
                                          size_t size, int *error)
{
    static char user[] = "team-ldap", empty[] = "";
    *entry = (struct passwd){user, empty, 5000, 1, empty, empty, empty};
    return answer(!strcmp(name, user), error);
}

static enum nss_status group(int is_a, int is_b, struct group *entry, int *error)
{
    static char a[] = "ldap-a", b[] = "ldap-b", empty[] = "", *nobody[] = {NULL};
    *entry = (struct group){is_a ? a : b, empty, is_a ? 5001 : 5002, nobody};
    return answer(is_a || is_b, error);
}

enum nss_status _nss_directory_getgrnam_r(const char *name, struct group *entry, char *buffer,
                                          size_t size, int *error)
{
    return group(!strcmp(name, "ldap-a"), !strcmp(name, "ldap-b"), entry, error);
}

enum nss_status _nss_directory_getgrgid_r(gid_t id, struct group *entry, char *buffer, size_t size,
                                          int *error)
{
    return group(id == 5001, id == 5002, entry, error);
}

enum nss_status _nss_directory_initgroups_dyn(const char *user, gid_t skipped, long *count,
                                              long *size, gid_t **groups, long most, int *error)
{
    enum nss_status status = answer(!strcmp(user, "team-ldap") || !strcmp(user, "daemon"), error);
    if (status == NSS_STATUS_SUCCESS) {
        *groups = realloc(*groups, (*size = *count + 2) * sizeof **groups);
        (*groups)[(*count)++] = 5001;
        (*groups)[(*count)++] = 5002;
    }
    return status;
}
