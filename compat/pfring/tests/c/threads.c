/*
 * One ring in several threads and signal handlers, as PF_RING's programs use it. It ends with 0 and "ok", or
 * says what was wrong.
 *
 *     threads loop DEVICE COUNT     statistics and settings beside pfring_loop, until a handler breaks
 *                                   it after COUNT packets
 *     threads recv DEVICE COUNT     the same beside pfring_recv
 *     threads close DEVICE ROUNDS   closed by another thread or a handler, while one loops
 */
#include <pfring.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#define CHECK(what)                                                                       \
    do {                                                                                  \
        if (!(what)) {                                                                    \
            fprintf(stderr, "line %d: not %s; %lu seen\n", __LINE__, #what, (unsigned long)seen); \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

static pfring *ring;
static atomic_ulong seen, bad, alarms, asked;
static unsigned long wanted;
static atomic_int over;
static pthread_t reader;

static void each(const struct pfring_pkthdr *h, const u_char *p, const u_char *user)
{
    (void)user;
    /* The generator's frames are IPv4. */
    if (h->caplen < 60 || h->len < h->caplen || p[12] != 8 || p[13] != 0)
        bad++;
    seen++;
}

/* As pfcount's handler of SIGALRM does. */
static void on_alarm(int number)
{
    pfring_stat stats;
    (void)number;
    if (pfring_stats(ring, &stats) != 0 || stats.drop != 0)
        bad++;
    alarms++;
}

/* As its handler of SIGINT does. */
static void on_break(int number)
{
    (void)number;
    pfring_breakloop(ring);
}

static void on_close(int number)
{
    (void)number;
    pfring_close(ring);
}

static void *ask(void *unused)
{
    unsigned long before = 0;
    while (!over) {
        pfring_stat stats;
        CHECK(pfring_stats(ring, &stats) == 0);
        CHECK(stats.recv >= before && stats.drop == 0);
        before = stats.recv;
        asked++;
        usleep(500);
    }
    return unused;
}

static void *set(void *unused)
{
    for (unsigned round = 1; !over; round++) {
        CHECK(pfring_set_poll_watermark(ring, round % 64) == 0);
        CHECK(pfring_set_poll_duration(ring, 1 + round % 20) == 0);
        CHECK(pfring_set_poll_watermark_timeout(ring, round % 5) == 0);
        CHECK(pfring_set_bpf_filter(ring, round % 2 ? "ip" : "udp") == 0);
        CHECK(pfring_get_num_queued_pkts(ring) < 1u << 24);
        usleep(3000);
    }
    return unused;
}

/* Breaks the reader's loop when it has enough, by a signal that it handles itself. */
static void *stop(void *unused)
{
    while (seen < wanted)
        usleep(1000);
    pthread_kill(reader, SIGUSR1);
    return unused;
}

static void open_ring(const char *device)
{
    ring = pfring_open(device, 1514, PF_RING_LONG_HEADER);
    CHECK(ring != NULL);
    CHECK(pfring_enable_ring(ring) == 0);
}

static void handle(int number, void (*handler)(int))
{
    struct sigaction action = {.sa_handler = handler};
    CHECK(sigaction(number, &action, NULL) == 0);
}

/* Others get no signals that are sent to the process. */
static pthread_t start(void *(*run)(void *))
{
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    CHECK(pthread_sigmask(SIG_SETMASK, &all, &before) == 0);
    CHECK(pthread_create(&thread, NULL, run, NULL) == 0);
    CHECK(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
    return thread;
}

static void beside(const char *how, const char *device)
{
    struct itimerval often = {{0, 2000}, {0, 2000}}, never = {{0, 0}, {0, 0}};
    reader = pthread_self();
    open_ring(device);
    handle(SIGALRM, on_alarm);
    handle(SIGUSR1, on_break);
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    pthread_t others[] = {start(ask), start(ask), start(set), start(stop)};
    if (strcmp(how, "loop") == 0) {
        CHECK(pfring_loop(ring, each, NULL, 1) == 0);
    } else {
        struct pfring_pkthdr header;
        u_char *packet;
        int got;
        while ((got = pfring_recv(ring, &packet, 0, &header, 1)) > 0)
            each(&header, packet, NULL);
        CHECK(got == 0);
    }
    over = 1;
    for (unsigned i = 0; i < 4; i++)
        CHECK(pthread_join(others[i], NULL) == 0);
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    pfring_stat stats;
    CHECK(pfring_stats(ring, &stats) == 0);
    CHECK(stats.recv == seen && stats.drop == 0 && seen >= wanted && bad == 0);
    CHECK(alarms > 0 && asked > 0);
    pfring_close(ring);
}

static void *loop(void *unused)
{
    /* It ends because the ring is closed, and the ring is there until it has ended. */
    CHECK(pfring_loop(ring, each, NULL, 1) < 0);
    return unused;
}

static void closed(const char *device, unsigned rounds)
{
    handle(SIGUSR1, on_close);
    for (unsigned round = 0; round < rounds; round++) {
        unsigned long before = seen;
        open_ring(device);
        CHECK(pthread_create(&reader, NULL, loop, NULL) == 0);
        while (seen < before + 5)
            usleep(100);
        if (round % 2)
            pthread_kill(reader, SIGUSR1);
        else
            pfring_close(ring);
        CHECK(pthread_join(reader, NULL) == 0);
    }
    CHECK(bad == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    wanted = strtoul(argv[3], NULL, 10);
    if (strcmp(argv[1], "close") == 0)
        closed(argv[2], wanted);
    else
        beside(argv[1], argv[2]);
    puts("ok");
    return 0;
}
