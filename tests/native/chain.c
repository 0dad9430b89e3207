/* Forks and exits, for half a minute, after as many microseconds as it is told (or at once):
   whoever looks finds a process that is gone. */
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    time_t end = time(0) + 30;
    while (time(0) < end) {
        usleep(count > 1 ? atoi(arguments[1]) : 0);
        if (fork() > 0)
            _exit(0);
    }
    return 0;
}
