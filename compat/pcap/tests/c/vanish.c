/*
 * How a program that waits for the descriptor itself, or does not wait, learns that the interface has
 * vanished. It says "listening", and ends with 0 and "ok" when it was told, or says what was wrong.
 *
 *     vanish DEVICE select      select, then a call that would wait
 *     vanish DEVICE poll        poll, nonblocking
 *     vanish DEVICE edge        epoll, edge-triggered, nonblocking
 *     vanish DEVICE next        poll and pcap_next_ex, nonblocking
 *     vanish DEVICE spin        nonblocking, no descriptor
 */
#define _GNU_SOURCE
#include <pcap/pcap.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what)                                                                       \
    do {                                                                                  \
        if (!(what)) {                                                                    \
            fprintf(stderr, "line %d: not %s: %s\n", __LINE__, #what, p ? pcap_geterr(p) : errbuf); \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

static char errbuf[PCAP_ERRBUF_SIZE];
static pcap_t *p;
static unsigned seen;

static void on_packet(u_char *user, const struct pcap_pkthdr *header, const u_char *bytes)
{
    (void)user, (void)header, (void)bytes;
    seen++;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* As pcap_dispatch: how many packets, or less than 0. */
static int next(void)
{
    struct pcap_pkthdr *header;
    const u_char *bytes;
    int status = pcap_next_ex(p, &header, &bytes);
    if (status > 0)
        on_packet(NULL, header, bytes);
    return status;
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    const char *way = argv[2];
    int waits = strcmp(way, "select") == 0, spins = strcmp(way, "spin") == 0;
    int edge = strcmp(way, "edge") == 0, one = strcmp(way, "next") == 0;
    p = pcap_create(argv[1], errbuf);
    /* Whoever is told too early that there is something waits so long. */
    CHECK(p && pcap_set_timeout(p, 20000) == 0 && pcap_set_immediate_mode(p, 1) == 0);
    CHECK(pcap_activate(p) == 0);
    CHECK(waits || pcap_setnonblock(p, 1, errbuf) == 0);
    int fd = spins ? -1 : pcap_get_selectable_fd(p), set = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN | (edge ? EPOLLET : 0)};
    CHECK(spins || (fd >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0));
    puts("listening");
    fflush(stdout);
    double began = now();
    unsigned calls = 0;
    int status;
    do {
        CHECK(now() - began < 60);
        if (spins) {
            usleep(1000);
        } else if (waits) {
            fd_set fds;
            FD_ZERO(&fds);
            FD_SET(fd, &fds);
            struct timeval limit = {.tv_sec = 30};
            CHECK(select(fd + 1, &fds, NULL, NULL, &limit) == 1);
        } else if (edge) {
            CHECK(epoll_wait(set, &event, 1, 30000) == 1);
        } else {
            struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
            CHECK(poll(&poll_fd, 1, 30000) == 1);
        }
        double called = now();
        do {
            status = one ? next() : pcap_dispatch(p, -1, on_packet, NULL);
            calls++;
        } while (edge && status > 0);
        CHECK(now() - called < 2);
    } while (status >= 0);
    CHECK(status == PCAP_ERROR && strcmp(pcap_geterr(p), "The interface disappeared") == 0);
    CHECK(seen == 10);
    /* About one call a second without packets: the descriptor does not stay readable. */
    CHECK(spins || calls < 40 + 4 * (now() - began));
    pcap_close(p);
    puts("ok");
    return 0;
}
