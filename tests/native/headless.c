/* Its main thread ends, and another one stays: a process that looks like a zombie and runs. */
#include <pthread.h>
#include <unistd.h>

static void *stay(void *unused)
{
    pause();
    return unused;
}

int main(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, stay, NULL))
        return 1;
    pthread_exit(NULL);
}
