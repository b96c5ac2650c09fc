/*
 * Reads one device in an epoll loop and prints one line per packet.
 *
 *     cc epoll.c -lvnplug -o epoll && ./epoll host:eth1 "udp port 53"
 */
#include <errno.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <vnplug.h>

/* Reads until nothing is left. Returns 0 to go on, 1 at the end, -1 on an error. */
static int drain(vnplug_port *port)
{
    struct vnplug_packet packets[64];
    size_t count;
    int got;

    while ((got = vnplug_next_batch(port, packets, 64, &count)) == VNPLUG_PACKET) {
        for (size_t i = 0; i < count; i++)
            printf("%u of %u bytes, first %02x, lost %u%s\n", packets[i].cap_len,
                   packets[i].wire_len, packets[i].data[0], packets[i].lost,
                   packets[i].flags & VNPLUG_FLAG_GAP ? ", gap" : "");
        fflush(stdout);
    }
    if (got == VNPLUG_NOTHING)
        return 0;
    if (got == VNPLUG_ENDED)
        return 1;
    fprintf(stderr, "%s: %s\n", vnplug_device_name(port), vnplug_last_error(port));
    return -1;
}

int main(int argc, char **argv)
{
    struct vnplug_options options;
    struct vnplug_stats stats = {.size = sizeof stats};
    struct epoll_event event = {.events = EPOLLIN};
    char error[VNPLUG_ERRBUF];
    vnplug_port *port;
    int epoll, over;

    vnplug_options_init(&options);
    options.device = argc > 1 ? argv[1] : NULL;
    options.filter = argc > 2 ? argv[2] : NULL;
    if (vnplug_open(&options, error, sizeof error, &port) < 0) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    epoll = epoll_create1(EPOLL_CLOEXEC);
    if (epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, vnplug_fd(port), &event) < 0) {
        perror("epoll");
        return 1;
    }
    /* Once before the first wait; then at each event. */
    while ((over = drain(port)) == 0)
        if (epoll_wait(epoll, &event, 1, -1) < 0 && errno != EINTR)
            break;
    vnplug_stats(port, &stats);
    printf("%llu received, %llu lost\n", (unsigned long long)stats.received,
           (unsigned long long)stats.lost);
    vnplug_close(port);
    return over == 1 ? 0 : 1;
}
