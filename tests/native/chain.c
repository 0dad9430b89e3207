/* Forks and exits without pause: whoever looks for it finds a process that is gone. */
#include <unistd.h>

int main(void)
{
    for (;;)
        if (fork() > 0)
            _exit(0);
}
