/* A setuid program that keeps its caller's environment, as many do. */
#include <stdio.h>
#include <unistd.h>

int main(void) {
    printf("euid %d\n", (int)geteuid());
    fflush(stdout);
    sleep(1000);
    return 0;
}
