/*
 * A program over libpcap that uses one handle in several threads, one way per command, as programs
 * do. It ends with 0 and "ok …", or says what was wrong.
 *
 *     threads stats DEVICE COUNT INTERVAL_US    statistics beside a reader, to the end of the source
 *     threads signal DEVICE COUNT INTERVAL_US   the same by a signal handler
 *     threads all DEVICE COUNT INTERVAL_US      everything at once beside a reader
 *     threads inject DEVICE COUNT               two threads send COUNT frames each beside a reader
 *     threads idle DEVICE                       how long statistics take while the reader sleeps
 *     threads close DEVICE DAEMON               closed while another thread asks for statistics
 */
#define _GNU_SOURCE
#include <pcap/pcap.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what)                                                                     \
    do {                                                                                \
        if (!(what)) {                                                                  \
            fprintf(stderr, "line %d: not %s: %s\n", __LINE__, #what, pcap_geterr(p)); \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

static char errbuf[PCAP_ERRBUF_SIZE];
static pcap_t *p;
static unsigned long seen;
static atomic_ulong count;
static long interval_us;
static atomic_bool over;
static atomic_ulong asked;

static void on_packet(u_char *user, const struct pcap_pkthdr *header, const u_char *bytes)
{
    (void)user;
    if (header->caplen == 0 || header->len < header->caplen || bytes[12] != 8) {
        fprintf(stderr, "a strange packet: %u of %u\n", header->caplen, header->len);
        exit(1);
    }
    seen++;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void open_device(const char *device)
{
    p = pcap_create(device, errbuf);
    if (!p) {
        fprintf(stderr, "%s\n", errbuf);
        exit(1);
    }
    CHECK(pcap_set_buffer_size(p, 16 << 20) == 0 && pcap_set_timeout(p, 50) == 0);
    CHECK(pcap_activate(p) == 0);
}

static void *ask(void *unused)
{
    unsigned before = 0;
    while (!over) {
        struct pcap_stat stats;
        CHECK(pcap_stats(p, &stats) == 0);
        CHECK(stats.ps_recv >= before && stats.ps_recv <= count && stats.ps_drop == 0);
        before = stats.ps_recv;
        asked++;
        usleep(interval_us);
    }
    return unused;
}

static void *ask_once(void *unused)
{
    struct pcap_stat stats;
    pcap_stats(p, &stats);
    return unused;
}

static void on_alarm(int number)
{
    struct pcap_stat stats;
    (void)number;
    if (pcap_stats(p, &stats) == 0 && stats.ps_drop == 0)
        asked++;
}

/* What programs set and ask in other threads. The filter passes every packet. */
static void *meddle(void *unused)
{
    static const char *const filters[] = {"ip", "ip or arp", "udp or tcp or ip"};
    for (unsigned i = 0; !over; i++) {
        struct bpf_program program;
        char text[PCAP_ERRBUF_SIZE];
        CHECK(pcap_compile(p, &program, filters[i % 3], 1, PCAP_NETMASK_UNKNOWN) == 0);
        /* At the end of the source there is nothing to filter any more. */
        if (pcap_setfilter(p, &program) != 0)
            CHECK(strstr(pcap_geterr(p), "no such port") || strstr(pcap_geterr(p), "lost"));
        pcap_freecode(&program);
        CHECK(pcap_getnonblock(p, text) == 0 && pcap_setnonblock(p, 0, text) == 0);
        CHECK(pcap_get_selectable_fd(p) >= 0 && pcap_fileno(p) >= 0);
        CHECK(pcap_datalink(p) == DLT_EN10MB && pcap_snapshot(p) > 0 && pcap_bufsize(p) > 0);
        CHECK(pcap_setdirection(p, PCAP_D_INOUT) == 0 || strlen(pcap_geterr(p)) > 0);
        asked++;
        usleep(interval_us);
    }
    return unused;
}

static void *break_often(void *unused)
{
    while (!over) {
        pcap_breakloop(p);
        usleep(interval_us);
    }
    return unused;
}

static void *inject(void *result)
{
    u_char frame[60] = {[12] = 8};
    for (unsigned long i = 0; i < count; i++)
        if (pcap_inject(p, frame, sizeof frame) != sizeof frame)
            *(int *)result = 1;
    return NULL;
}

static void *loop(void *unused)
{
    CHECK(pcap_loop(p, -1, on_packet, NULL) == PCAP_ERROR_BREAK);
    return unused;
}

static int by_size(const void *one, const void *other)
{
    double difference = *(const double *)one - *(const double *)other;
    return (difference > 0) - (difference < 0);
}

/* Reads to the end of the source, in this thread. */
static void read_all(void)
{
    struct pcap_stat stats;
    int got;
    do
        got = pcap_dispatch(p, -1, on_packet, NULL);
    while (got >= 0 || got == PCAP_ERROR_BREAK);
    CHECK(strstr(pcap_geterr(p), "the source ended"));
    over = 1;
    CHECK(pcap_stats(p, &stats) == 0);
    if (seen != count || stats.ps_recv != count || stats.ps_drop != 0) {
        fprintf(stderr, "%lu of %lu, ps_recv %u, ps_drop %u\n", seen, (unsigned long)count,
                stats.ps_recv, stats.ps_drop);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";
    pthread_t threads[4];
    int n = 0;
    if (argc < 3)
        return 2;
    count = argc > 3 ? strtoul(argv[3], NULL, 10) : 0;
    interval_us = argc > 4 ? atol(argv[4]) : 1000;
    open_device(argv[2]);
    if (strcmp(command, "stats") == 0) {
        pthread_create(&threads[n++], NULL, ask, NULL);
        read_all();
    } else if (strcmp(command, "signal") == 0) {
        struct itimerval timer = {{0, interval_us}, {0, interval_us}}, none = {{0, 0}, {0, 0}};
        signal(SIGALRM, on_alarm);
        setitimer(ITIMER_REAL, &timer, NULL);
        read_all();
        setitimer(ITIMER_REAL, &none, NULL);
    } else if (strcmp(command, "all") == 0) {
        pthread_create(&threads[n++], NULL, ask, NULL);
        pthread_create(&threads[n++], NULL, meddle, NULL);
        pthread_create(&threads[n++], NULL, break_often, NULL);
        read_all();
    } else if (strcmp(command, "inject") == 0) {
        int failed[2] = {0, 0};
        double until = now() + 60;
        pthread_create(&threads[0], NULL, inject, &failed[0]);
        pthread_create(&threads[1], NULL, inject, &failed[1]);
        while (seen < 200 && now() < until)
            CHECK(pcap_dispatch(p, -1, on_packet, NULL) >= 0);
        pthread_join(threads[0], NULL);
        pthread_join(threads[1], NULL);
        CHECK(seen >= 200 && !failed[0] && !failed[1]);
        asked = 1;
    } else if (strcmp(command, "idle") == 0) {
        struct bpf_program nothing;
        double spent[50];
        CHECK(pcap_compile(p, &nothing, "ip proto 200", 1, PCAP_NETMASK_UNKNOWN) == 0);
        CHECK(pcap_setfilter(p, &nothing) == 0);
        pcap_freecode(&nothing);
        pthread_create(&threads[n++], NULL, loop, NULL);
        for (int i = 0; i < 50; i++) {
            struct pcap_stat stats;
            double begin = now();
            usleep(1000);
            CHECK(pcap_stats(p, &stats) == 0);
            spent[i] = now() - begin - 0.001;
            asked++;
        }
        qsort(spent, 50, sizeof *spent, by_size);
        printf("median %.0f us\n", spent[25] * 1e6);
        /* Half of them: the machine has other things to do. */
        CHECK(spent[25] < 0.02);
        pcap_breakloop(p);
    } else if (strcmp(command, "close") == 0) {
        /* The daemon stops, so that the other thread is within its call when the handle goes. */
        kill(count, SIGSTOP);
        pthread_create(&threads[0], NULL, ask_once, NULL);
        usleep(300000);
        pcap_close(p);
        pthread_join(threads[0], NULL);
        kill(count, SIGCONT);
        printf("ok\n");
        return 0;
    } else {
        return 2;
    }
    while (n > 0)
        pthread_join(threads[--n], NULL);
    CHECK(asked > 0);
    pcap_close(p);
    printf("ok %lu of %lu, asked %lu times\n", seen, (unsigned long)count, (unsigned long)asked);
    return 0;
}
