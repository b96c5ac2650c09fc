/*
 * A program over libpcap that tries one thing per command; the Rust tests start it with the drop-in
 * linked, preloaded or opened by dlopen. It ends with 0 and "ok …", or says what was wrong.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pcap/pcap.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <arpa/inet.h>
#include <dlfcn.h>
#include <limits.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what)                                                                    \
    do {                                                                               \
        if (!(what)) {                                                                 \
            fprintf(stderr, "line %d: not %s: %s\n", __LINE__, #what, p ? pcap_geterr(p) : errbuf); \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

static char errbuf[PCAP_ERRBUF_SIZE];
static pcap_t *p;
static unsigned long seen;

static void on_packet(u_char *user, const struct pcap_pkthdr *header, const u_char *bytes)
{
    (void)user;
    if (header->caplen == 0 || header->len < header->caplen || bytes[12] != 8) {
        fprintf(stderr, "a strange packet: %u of %u\n", header->caplen, header->len);
        exit(1);
    }
    seen++;
}

static void set_filter(const char *text)
{
    struct bpf_program program;
    CHECK(pcap_compile(p, &program, text, 1, PCAP_NETMASK_UNKNOWN) == 0);
    CHECK(pcap_setfilter(p, &program) == 0);
    pcap_freecode(&program);
}

static void open_device(const char *device, int timeout_ms, int immediate)
{
    p = pcap_create(device, errbuf);
    CHECK(p != NULL);
    /* Room for all of a source that ends: who is late loses nothing. */
    CHECK(pcap_set_buffer_size(p, 16 << 20) == 0);
    CHECK(pcap_set_snaplen(p, 2048) == 0 && pcap_set_promisc(p, 1) == 0);
    CHECK(pcap_set_timeout(p, timeout_ms) == 0);
    CHECK(pcap_set_immediate_mode(p, immediate) == 0);
    CHECK(pcap_activate(p) == 0);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* Waits for the descriptor as the command says; the handle is only used when it is readable. */
static void wait_loop(const char *how, unsigned long count, int per_call, int one_by_one)
{
    int fd, epfd = -1, edge = strcmp(how, "epoll-et") == 0;
    CHECK(pcap_setnonblock(p, 1, errbuf) == 0 && pcap_getnonblock(p, errbuf) == 1);
    fd = pcap_get_selectable_fd(p);
    CHECK(fd >= 0 && pcap_fileno(p) == fd && pcap_get_required_select_timeout(p) == NULL);
    if (strncmp(how, "epoll", 5) == 0) {
        struct epoll_event event = {.events = EPOLLIN | (edge ? EPOLLET : 0)};
        epfd = epoll_create1(0);
        CHECK(epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &event) == 0);
    }
    while (seen < count) {
        int ready, got;
        if (epfd >= 0) {
            struct epoll_event event;
            ready = epoll_wait(epfd, &event, 1, 60000);
        } else if (strcmp(how, "poll") == 0) {
            struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
            ready = poll(&poll_fd, 1, 60000);
        } else {
            struct timeval timeout = {.tv_sec = 60};
            fd_set set;
            FD_ZERO(&set);
            FD_SET(fd, &set);
            ready = select(fd + 1, &set, NULL, NULL, &timeout);
        }
        if (ready != 1) {
            fprintf(stderr, "%s: no wake-up after %lu packets\n", how, seen);
            exit(1);
        }
        do {
            if (one_by_one) {
                struct pcap_pkthdr *header;
                const u_char *bytes;
                got = pcap_next_ex(p, &header, &bytes);
                if (got == 1) {
                    /* The packet stays while the program sleeps. */
                    on_packet(NULL, header, bytes);
                }
            } else {
                got = pcap_dispatch(p, per_call, on_packet, NULL);
            }
            CHECK(got >= 0);
        } while (edge && got > 0);
    }
}

static void on_alarm(int number)
{
    (void)number;
    pcap_breakloop(p);
}

static void *break_later(void *unused)
{
    usleep(300000);
    pcap_breakloop(p);
    return unused;
}

/* A thread that is to wait, and until it does: it sleeps nowhere else by then. */
static volatile pid_t looping;

static void until_it_waits(void)
{
    for (int i = 0, asleep = 0; i < 6000 && asleep < 3; i++) {
        char path[64], text[512] = "", *end;
        FILE *file;
        usleep(10000);
        snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)looping);
        file = fopen(path, "r");
        if (file) {
            text[fread(text, 1, sizeof text - 1, file)] = 0;
            fclose(file);
        }
        end = strrchr(text, ')');
        asleep = end && strncmp(end, ") S", 3) == 0 ? asleep + 1 : 0;
    }
}

static void *loop_thread(void *result)
{
    looping = gettid();
    *(int *)result = pcap_loop(p, -1, on_packet, NULL);
    return NULL;
}

static void close_it(u_char *user, const struct pcap_pkthdr *header, const u_char *bytes)
{
    on_packet(user, header, bytes);
    pcap_close(p);
}

static int protocol_wanted;
static void on_protocol(u_char *user, const struct pcap_pkthdr *header, const u_char *bytes)
{
    on_packet(user, header, bytes);
    if (bytes[23] != protocol_wanted) {
        fprintf(stderr, "protocol %d in the place of %d\n", bytes[23], protocol_wanted);
        exit(1);
    }
}

static void absurd(const char *device)
{
    static const int snaplens[] = {INT_MAX, 262145, 262144, 65535, 1, 0, -1, INT_MIN};
    static const int buffers[] = {INT_MAX, 1 << 28, 1, 0, -1, INT_MIN};
    struct pcap_pkthdr *header;
    const u_char *bytes;
    struct bpf_program program;
    struct pcap_stat stats;
    int *list;

    for (size_t i = 0; i < sizeof snaplens / sizeof *snaplens; i++) {
        p = pcap_create(device, errbuf);
        CHECK(p && pcap_set_snaplen(p, snaplens[i]) == 0 && pcap_activate(p) == 0);
        int wanted = snaplens[i] > 0 && snaplens[i] <= 262144 ? snaplens[i] : 262144;
        CHECK(pcap_snapshot(p) == wanted);
        CHECK(pcap_next_ex(p, &header, &bytes) == 1 && (int)header->caplen <= wanted);
        pcap_close(p);
    }
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
        p = pcap_create(device, errbuf);
        CHECK(p && pcap_set_buffer_size(p, buffers[i]) == 0 && pcap_activate(p) == 0);
        CHECK(pcap_bufsize(p) > 0 && pcap_next_ex(p, &header, &bytes) == 1);
        pcap_close(p);
    }
    /* Before activation. */
    p = pcap_create(device, errbuf);
    CHECK(pcap_next_ex(p, &header, &bytes) == PCAP_ERROR_NOT_ACTIVATED);
    CHECK(pcap_dispatch(p, 1, on_packet, NULL) == PCAP_ERROR_NOT_ACTIVATED);
    CHECK(pcap_loop(p, 1, on_packet, NULL) == PCAP_ERROR_NOT_ACTIVATED);
    CHECK(pcap_stats(p, &stats) == PCAP_ERROR_NOT_ACTIVATED);
    CHECK(pcap_datalink(p) == PCAP_ERROR_NOT_ACTIVATED);
    CHECK(pcap_snapshot(p) == PCAP_ERROR_NOT_ACTIVATED);
    CHECK(pcap_setdirection(p, PCAP_D_IN) == PCAP_ERROR_NOT_ACTIVATED);
    CHECK(pcap_setfilter(p, NULL) == PCAP_ERROR_NOT_ACTIVATED);
    CHECK(pcap_list_datalinks(p, &list) == PCAP_ERROR_NOT_ACTIVATED);
    CHECK(pcap_compile(p, &program, "udp", 1, 0) == PCAP_ERROR);
    CHECK(strstr(pcap_geterr(p), "not-yet-activated"));
    CHECK(pcap_dump_open(p, "/dev/null") == NULL);
    CHECK(pcap_get_selectable_fd(p) == -1 && pcap_fileno(p) == -1);
    CHECK(pcap_set_tstamp_type(p, PCAP_TSTAMP_ADAPTER) == PCAP_WARNING_TSTAMP_TYPE_NOTSUP);
    CHECK(pcap_set_tstamp_type(p, PCAP_TSTAMP_HOST) == 0);
    CHECK(pcap_set_tstamp_precision(p, 9) == PCAP_ERROR_TSTAMP_PRECISION_NOTSUP);
    CHECK(pcap_set_tstamp_precision(p, PCAP_TSTAMP_PRECISION_NANO) == 0);
    CHECK(pcap_list_tstamp_types(p, &list) == 1 && list[0] == PCAP_TSTAMP_HOST);
    pcap_free_tstamp_types(list);
    CHECK(pcap_can_set_rfmon(p) == 0 && pcap_set_rfmon(p, 1) == 0);
    CHECK(pcap_activate(p) == PCAP_ERROR_RFMON_NOTSUP);
    CHECK(pcap_set_rfmon(p, 0) == 0);
    /* And after. */
    CHECK(pcap_activate(p) == 0 && pcap_activate(p) == PCAP_ERROR_ACTIVATED);
    CHECK(pcap_set_snaplen(p, 1) == PCAP_ERROR_ACTIVATED);
    CHECK(pcap_set_timeout(p, 1) == PCAP_ERROR_ACTIVATED);
    CHECK(pcap_get_tstamp_precision(p) == PCAP_TSTAMP_PRECISION_NANO);
    CHECK(pcap_datalink(p) == DLT_EN10MB && pcap_datalink_ext(p) == 0);
    CHECK(pcap_list_datalinks(p, &list) == 1 && list[0] == DLT_EN10MB);
    pcap_free_datalinks(list);
    CHECK(pcap_set_datalink(p, DLT_EN10MB) == 0 && pcap_set_datalink(p, DLT_RAW) == PCAP_ERROR);
    CHECK(pcap_is_swapped(p) == 0 && pcap_file(p) == NULL);
    CHECK(pcap_inject(p, "x", 0) == PCAP_ERROR && strstr(pcap_geterr(p), "no frame"));
    CHECK(pcap_inject(p, NULL, 60) == PCAP_ERROR && pcap_sendpacket(p, NULL, 60) == PCAP_ERROR);
    CHECK(pcap_sendpacket(p, (const u_char *)"x", -1) == PCAP_ERROR);
    CHECK(pcap_compile(p, &program, "tcp prot 80", 1, 0) == PCAP_ERROR);
    CHECK(strstr(pcap_geterr(p), "syntax error"));
    CHECK(pcap_setfilter(p, NULL) == PCAP_ERROR);
    struct bpf_insn wild = {0xffff, 7, 7, 7};
    struct bpf_program bad = {1, &wild};
    CHECK(pcap_setfilter(p, &bad) == PCAP_ERROR && strstr(pcap_geterr(p), "not valid"));
    bad.bf_len = 1000000;
    CHECK(pcap_setfilter(p, &bad) == PCAP_ERROR);
    CHECK(pcap_setdirection(p, PCAP_D_IN) == 0 && pcap_setdirection(p, PCAP_D_INOUT) == 0);
    CHECK(pcap_dispatch(p, 1, NULL, NULL) == PCAP_ERROR);
    CHECK(pcap_dump_open(p, "/no/such/place") == NULL && strstr(pcap_geterr(p), "/no/such"));
    pcap_dumper_t *dumper = pcap_dump_open(p, "/dev/null");
    CHECK(dumper != NULL && pcap_dispatch(p, 5, pcap_dump, (u_char *)dumper) > 0);
    pcap_dump_close(dumper);
    CHECK(pcap_next_ex(p, &header, &bytes) == 1 && header->ts.tv_usec < 1000000000);
    struct pcap_pkthdr copy;
    CHECK(pcap_next(p, &copy) != NULL && copy.caplen > 0);
    pcap_close(p);
    p = pcap_open_live("host:nosuch", 100, 1, 10, errbuf);
    CHECK(p == NULL && strstr(errbuf, "No such device exists"));
    p = pcap_create("host:nosuch", errbuf);
    CHECK(p && pcap_activate(p) == PCAP_ERROR_NO_SUCH_DEVICE);
    pcap_close(p);
    p = NULL;
    seen = 1;
}

/* Real and vNPlug devices in one process, in two threads. */
static pcap_t *real_p;
static void on_real(u_char *user, const struct pcap_pkthdr *header, const u_char *bytes)
{
    (void)header, (void)bytes;
    ++*(int *)user;
}

static void *real_loop(void *count)
{
    if (pcap_loop(real_p, 20, on_real, count) != 0)
        *(int *)count = -1;
    return NULL;
}

static void both(const char *device)
{
    pthread_t thread;
    struct bpf_program program;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(9999)};
    int real_count = 0, sender = socket(AF_INET, SOCK_DGRAM, 0);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    real_p = pcap_open_live("lo", 2048, 0, 10, errbuf);
    CHECK(real_p != NULL);
    CHECK(pcap_compile(real_p, &program, "udp port 9999", 1, 0) == 0);
    CHECK(pcap_setfilter(real_p, &program) == 0);
    pcap_freecode(&program);
    open_device(device, 10, 0);
    CHECK(pthread_create(&thread, NULL, real_loop, &real_count) == 0);
    for (int i = 0; i < 40 || seen < 100; i++) {
        if (i < 40)
            sendto(sender, "x", 1, 0, (struct sockaddr *)&to, sizeof to);
        CHECK(pcap_dispatch(p, 10, on_packet, NULL) >= 0);
    }
    pthread_join(thread, NULL);
    CHECK(real_count == 20);
    pcap_close(real_p);
    CHECK(strstr(pcap_lib_version(), "libpcap version 1."));
}

/* Everything by dlsym, as a program that loads libpcap when it needs it. */
static int next_one(struct pcap_pkthdr **header, const u_char **bytes)
{
    double until = now() + 60;
    int got;
    do
        got = pcap_next_ex(p, header, bytes);
    while (got == 0 && now() < until);
    return got == 1;
}

static void by_dlopen(const char *device, const char *name)
{
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    pcap_t *(*live)(const char *, int, int, int, char *) = dlsym(library, "pcap_open_live");
    int (*next)(pcap_t *, struct pcap_pkthdr **, const u_char **) = dlsym(library, "pcap_next_ex");
    void (*end)(pcap_t *) = dlsym(library, "pcap_close");
    pcap_t *one = live(device, 100, 1, 100, errbuf);
    struct pcap_pkthdr *header;
    const u_char *bytes;
    CHECK(one != NULL);
    while (seen < 100) {
        int got = next(one, &header, &bytes);
        CHECK(got >= 0);
        seen += got;
    }
    end(one);
    one = live("nosuchinterface", 100, 1, 100, errbuf);
    CHECK(one == NULL && strstr(errbuf, "No such device exists"));
}

/* Two calls that PF_RING's libpcap has; the system's header does not know them. */
static void pfring_calls(const char *device)
{
    int (*set_name)(pcap_t *, char *), (*set_watermark)(pcap_t *, u_int);
    struct pcap_pkthdr *header;
    const u_char *bytes;
    double begun, longest = 0;
    *(void **)&set_name = dlsym(RTLD_DEFAULT, "pcap_set_application_name");
    *(void **)&set_watermark = dlsym(RTLD_DEFAULT, "pcap_set_watermark");
    CHECK(set_name != NULL && set_watermark != NULL);
    p = pcap_open_dead(DLT_EN10MB, 100);
    CHECK(set_name(p, "dead") == PCAP_ERROR && set_watermark(p, 1) == PCAP_ERROR);
    pcap_close(p);
    p = pcap_create(device, errbuf);
    CHECK(p != NULL && set_name(p, "counter") == 0 && set_name(p, NULL) == PCAP_ERROR);
    CHECK(pcap_set_timeout(p, 60000) == 0 && pcap_activate(p) == 0);
    CHECK(set_watermark(p, 100) == 0);
    /* Of 200 packets a second the hundredth is there long before the timeout, and long after the one
       before it. A packet may have come before the watermark: then it is read at once. */
    for (int packet = 0; packet < 300 && longest <= 0.3; packet++) {
        begun = now();
        CHECK(pcap_next_ex(p, &header, &bytes) == 1);
        if (now() - begun > longest)
            longest = now() - begun;
    }
    CHECK(longest > 0.3 && longest < 30);
    CHECK(set_name(p, "later") == 0 && set_watermark(p, 0) == 0);
    getchar();
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "", *device = argc > 2 ? argv[2] : "";
    unsigned long count = argc > 3 ? strtoul(argv[3], NULL, 10) : 0;
    struct pcap_pkthdr *header;
    const u_char *bytes;
    struct pcap_stat stats;

    if (strcmp(command, "absurd") == 0) {
        absurd(device);
    } else if (strcmp(command, "dlopen") == 0) {
        by_dlopen(device, argc > 3 ? argv[3] : "libpcap.so.0.8");
    } else if (strcmp(command, "both") == 0) {
        both(device);
    } else if (strcmp(command, "list") == 0) {
        pcap_if_t *all, *each;
        int real_devices = 0;
        CHECK(pcap_findalldevs(&all, errbuf) == 0);
        for (each = all; each; each = each->next) {
            real_devices += strcmp(each->name, "lo") == 0 || strcmp(each->name, "any") == 0;
            if (strncmp(each->name, "vnplug:", 7) == 0)
                printf("%s (%s)\n", each->name, each->description);
        }
        pcap_freealldevs(all);
        CHECK(real_devices == 2);
        seen = 1;
    } else if (strcmp(command, "unreachable") == 0) {
        CHECK(pcap_open_live(device, 100, 1, 10, errbuf) == NULL);
        CHECK(strstr(errbuf, "start the daemon"));
        seen = 1;
    } else if (strcmp(command, "count") == 0) {
        open_device(device, 50, 0);
        while (seen < count) {
            int got = pcap_next_ex(p, &header, &bytes);
            CHECK(got >= 0);
            if (got)
                on_packet(NULL, header, bytes);
        }
    } else if (strcmp(command, "ended") == 0) {
        open_device(device, 50, 0);
        CHECK(pcap_loop(p, -1, on_packet, NULL) == PCAP_ERROR);
        CHECK(strstr(pcap_geterr(p), "the source ended"));
        CHECK(pcap_next_ex(p, &header, &bytes) == PCAP_ERROR);
        CHECK(pcap_dispatch(p, 1, on_packet, NULL) == PCAP_ERROR);
        CHECK(pcap_stats(p, &stats) == 0);
        CHECK(stats.ps_recv == seen && stats.ps_drop == 0 && seen == count);
    } else if (strcmp(command, "refuse") == 0) {
        static u_char frame[9000] = {[12] = 8};
        static const int bad[] = {1, 13, 1515, 9000};
        open_device(device, 20, 0);
        if (strcmp(argv[3], "lengths") == 0) {
            CHECK(pcap_inject(p, frame, 60) == 60 && pcap_inject(p, frame, 1514) == 1514);
            for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
                CHECK(pcap_inject(p, frame, bad[i]) == PCAP_ERROR);
                CHECK(strncmp(pcap_geterr(p), "send: ", 6) == 0);
            }
            frame[12] = 0x81;
            CHECK(pcap_inject(p, frame, 1518) == 1518 && pcap_inject(p, frame, 1519) == PCAP_ERROR);
        } else {
            double until = now() + 60;
            while (pcap_inject(p, frame, 60) == 60 && now() < until)
                usleep(10000);
            CHECK(strcmp(pcap_geterr(p), "send: Network is down") == 0);
        }
    } else if (strcmp(command, "cut") == 0) {
        /* What a filter returns cuts the packet, as the kernel does it. */
        struct bpf_insn by_first[] = {BPF_STMT(BPF_LD | BPF_B | BPF_ABS, 23),
                                      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 6, 0, 1),
                                      BPF_STMT(BPF_RET | BPF_K, 50), BPF_STMT(BPF_RET | BPF_K, 80)};
        struct bpf_program program, hand = {4, by_first};
        open_device(device, 20, 0);
        pcap_t *dead = pcap_open_dead(DLT_EN10MB, 70);
        CHECK(pcap_compile(dead, &program, "ip", 1, 0) == 0);
        pcap_close(dead);
        CHECK(pcap_setfilter(p, &program) == 0);
        pcap_freecode(&program);
        for (int i = 0; i < 50; i++) {
            CHECK(next_one(&header, &bytes) && header->caplen == 70 && header->len == 128);
        }
        CHECK(pcap_setfilter(p, &hand) == 0);
        for (int i = 0; i < 50; i++) {
            CHECK(next_one(&header, &bytes) && header->len == 128);
            CHECK(header->caplen == (bytes[23] == 6 ? 50u : 80u));
        }
        set_filter("ip");
        CHECK(next_one(&header, &bytes) && header->caplen == 128);
    } else if (strcmp(command, "overflow") == 0) {
        p = pcap_create(device, errbuf);
        CHECK(p && pcap_set_snaplen(p, 128) == 0 && pcap_set_buffer_size(p, 1 << 16) == 0);
        CHECK(pcap_activate(p) == 0);
        double until = now() + 20;
        do {
            usleep(100000);
            CHECK(pcap_stats(p, &stats) == 0);
        } while (stats.ps_recv < count && now() < until);
        CHECK(pcap_loop(p, -1, on_packet, NULL) == PCAP_ERROR);
        CHECK(pcap_stats(p, &stats) == 0);
        CHECK(stats.ps_recv == count && stats.ps_drop > 0 && seen + stats.ps_drop == count);
    } else if (strcmp(command, "break-signal") == 0 || strcmp(command, "break-thread") == 0) {
        open_device(device, 1000, 0);
        set_filter("ip proto 200");
        /* Twice: the flag is cleared by the first. */
        for (int i = 0; i < 2; i++) {
            pthread_t thread;
            if (command[6] == 's') {
                struct itimerval timer = {.it_value = {.tv_usec = 300000}};
                signal(SIGALRM, on_alarm);
                setitimer(ITIMER_REAL, &timer, NULL);
            } else {
                CHECK(pthread_create(&thread, NULL, break_later, NULL) == 0);
            }
            CHECK(pcap_loop(p, -1, on_packet, NULL) == PCAP_ERROR_BREAK);
            if (command[6] == 't')
                pthread_join(thread, NULL);
        }
        pcap_breakloop(p);
        CHECK(pcap_dispatch(p, -1, on_packet, NULL) == PCAP_ERROR_BREAK);
        CHECK(seen == 0);
        seen = 1;
    } else if (strcmp(command, "timeout") == 0) {
        double start;
        open_device(device, 300, 0);
        set_filter("ip proto 200");
        start = now();
        CHECK(pcap_dispatch(p, -1, on_packet, NULL) == 0 && now() - start > 0.25);
        start = now();
        CHECK(pcap_next_ex(p, &header, &bytes) == 0 && now() - start > 0.25);
        CHECK(pcap_setnonblock(p, 1, errbuf) == 0);
        CHECK(pcap_dispatch(p, -1, on_packet, NULL) == 0);
        CHECK(pcap_next_ex(p, &header, &bytes) == 0);
        seen = 1;
    } else if (strcmp(command, "fork") == 0) {
        int status;
        pid_t child, grandchild;
        open_device(device, 50, 0);
        /* As a daemon: the child of a parent that has gone reads on. */
        child = fork();
        if (child == 0) {
            grandchild = fork();
            if (grandchild != 0)
                exit(0);
            usleep(300000);
            CHECK(pcap_loop(p, (int)count, on_packet, NULL) == 0);
            CHECK(pcap_stats(p, &stats) == 0 && stats.ps_recv >= count);
            printf("ok %lu\n", seen);
            exit(0);
        }
        pcap_close(p);
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        return 0;
    } else if (strcmp(command, "close-thread") == 0) {
        pthread_t thread;
        int result = 0;
        open_device(device, 50, 0);
        set_filter("ip proto 200");
        CHECK(pthread_create(&thread, NULL, loop_thread, &result) == 0);
        until_it_waits();
        pcap_close(p);
        pthread_join(thread, NULL);
        CHECK(result == PCAP_ERROR_BREAK);
        CHECK(pcap_stats(p, &stats) == PCAP_ERROR_NOT_ACTIVATED);
        return printf("ok\n") < 0;
    } else if (strcmp(command, "close-callback") == 0) {
        open_device(device, 50, 0);
        CHECK(pcap_loop(p, -1, close_it, NULL) == PCAP_ERROR_BREAK);
        return printf("ok\n") < 0;
    } else if (strcmp(command, "inject") == 0) {
        unsigned char frame[1514] = { 1, 2, 3 };
        open_device(device, 50, 0);
        for (unsigned long sent = 0; sent < count; sent++) {
            CHECK(pcap_inject(p, frame, 60 + sent % 1400) == (int)(60 + sent % 1400));
            CHECK(pcap_sendpacket(p, frame, sizeof frame) == 0);
        }
        CHECK(pcap_inject(p, frame, 0) == PCAP_ERROR);
    } else if (strcmp(command, "pfring") == 0) {
        pfring_calls(device);
    } else if (strcmp(command, "filter") == 0) {
        open_device(device, 50, 0);
        /* Packets of before are in the ring at each change. */
        for (unsigned long round = 0; round < count; round++) {
            protocol_wanted = round % 2 ? 6 : 17;
            set_filter(round % 2 ? "tcp" : "udp");
            CHECK(pcap_loop(p, 200, on_protocol, NULL) == 0);
            usleep(5000);
        }
    } else {
        int one_by_one = argc > 4 && strcmp(argv[4], "next") == 0;
        open_device(device, 20, argc > 5);
        wait_loop(command, count, argc > 4 ? atoi(argv[4]) : -1, one_by_one);
    }
    if (p)
        pcap_close(p);
    printf("ok %lu\n", seen);
    return 0;
}
