/*
 * Stands in for ssh when the cost of launching is measured: reaches no other machine, answers as a host would.
 *
 *     ssh [OPTIONS] HOST COMMAND...       with STUB_SSH=FOLDER in the environment
 *
 * "hostname" and "hostname -I" are answered. DeepSpeed's node launcher has its orders with its command line: a line
 * "HOST SECONDS" is added to FOLDER/orders. Any other command is one that talks over its standard streams; they are
 * joined to FOLDER/hosts.sock, a socket that first hears the name of the host.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static void has_orders(const char *folder, const char *host)
{
    char path[4096], line[512];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    snprintf(path, sizeof path, "%s/orders", folder);
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0644);
    int length = snprintf(line, sizeof line, "%s %ld.%09ld\n", host, (long)now.tv_sec, now.tv_nsec);
    if (file < 0 || write(file, line, length) != length) /* one write: lines of many hosts do not mix */
        exit(97);
}

static int copy(int from, int to)
{
    static char data[1 << 16];
    ssize_t got = read(from, data, sizeof data), put = 0;
    for (ssize_t done = 0; done < got; done += put)
        if ((put = write(to, data + done, got - done)) < 0)
            return 0;
    return got > 0;
}

static void join(const char *folder, const char *host)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s/hosts.sock", folder);
    int hosts = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(hosts, (struct sockaddr *)&address, sizeof address) < 0 || dprintf(hosts, "%s\n", host) < 0)
        exit(98);
    struct pollfd ends[2] = {{.fd = 0, .events = POLLIN}, {.fd = hosts, .events = POLLIN}};
    while (poll(ends, 2, -1) > 0) {
        if (ends[0].revents && !copy(0, hosts))
            return;
        if (ends[1].revents && !copy(hosts, 1))
            return;
    }
}

int main(int argc, char **argv)
{
    char command[1 << 16] = "";
    size_t length = 0;
    const char *folder = getenv("STUB_SSH");
    while (getopt(argc, argv, "+1246AaCfGgKkMNnqsTtVvXxYyB:b:c:D:E:e:F:I:i:J:L:l:m:O:o:P:p:Q:R:S:W:w:") != -1)
        ;
    if (!folder || optind + 1 >= argc)
        return 96;
    const char *host = argv[optind];
    for (int i = optind + 1; i < argc && length < sizeof command; i++)
        length += snprintf(command + length, sizeof command - length, "%s%s", i > optind + 1 ? " " : "", argv[i]);
    if (strcmp(command, "hostname") == 0 || strcmp(command, "hostname -I") == 0) {
        puts(host);
    } else if (strstr(command, "deepspeed.launcher.launch")) {
        has_orders(folder, host);
        pause(); /* the ranks work */
    } else {
        join(folder, host);
    }
    return 0;
}
