/*
 * Every other call, once, on a generator without an end (argv[1]) and on one with (argv[2]). Says
 * which line is wrong.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>

#include "pfring.h"

#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!(condition)) {                                                  \
            printf("line %d: %s (errno %d)\n", __LINE__, #condition, errno); \
            exit(1);                                                         \
        }                                                                    \
    } while (0)

static pfring *ring;

static void on_alarm(int signal)
{
    pfring_stat stats;
    (void)signal;
    CHECK(pfring_stats(ring, &stats) == 0);
    pfring_breakloop(ring);
}

/* Whether the first thread sleeps, as proc(5) tells. */
static int main_sleeps(void)
{
    char path[64], text[512] = "", *end;
    FILE *file;
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)getpid());
    file = fopen(path, "r");
    if (file != NULL) {
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        fclose(file);
    }
    end = strrchr(text, ')');
    return end != NULL && strncmp(end, ") S", 3) == 0;
}

/* When the first thread waits for packets: it sleeps nowhere else by then. */
static void *breaks(void *user)
{
    for (int i = 0, asleep = 0; i < 6000 && asleep < 3; i++) {
        usleep(10000);
        asleep = main_sleeps() ? asleep + 1 : 0;
    }
    if (user == NULL)
        pfring_breakloop(ring);
    else if (user == (void *)1)
        pfring_shutdown(ring);
    else
        pfring_close(ring);
    return NULL;
}

static void ignore(const struct pfring_pkthdr *h, const u_char *p, const u_char *user)
{
    (void)h, (void)p, (void)user;
}

static pfring *opened(const char *device, u_int32_t flags)
{
    pfring *one = pfring_open(device, 128, flags);
    CHECK(one != NULL);
    return one;
}

static void opening(const char *device)
{
    char long_name[4096];
    pfring *one;
    CHECK(pfring_open(NULL, 0, 0) == NULL && errno == EINVAL);
    CHECK(pfring_open("no-such-device", 0, 0) == NULL && errno == ENODEV);
    CHECK(pfring_open("", 0, 0) == NULL && errno == ENODEV);
    memset(long_name, 'x', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = 0;
    CHECK(pfring_open(long_name, 0, 0) == NULL);
    one = pfring_open("none", 1500, 0);
    CHECK(one != NULL && pfring_bind(one, (char *)"no-such-device") < 0);
    CHECK(pfring_bind(one, (char *)device) == 0);
    CHECK(pfring_enable_ring(one) == 0);
    CHECK(pfring_bind(one, (char *)device) == PF_RING_ERROR_INVALID_STATUS);
    pfring_close(one);
    one = pfring_open(device, 0xffffffff, 0xffffffff & ~PF_RING_REENTRANT);
    CHECK(one != NULL);
    pfring_close(one);
    pfring_close(NULL);
}

static void knowing(const char *device)
{
    pfring_card_settings card;
    pfring_if_t *list, *one;
    u_int32_t version = 0;
    struct timespec ts;
    u_char mac[6], frame[60] = { 0 }, *data;
    struct pfring_pkthdr header;
    int index, found = 0;

    ring = opened(device, PF_RING_LONG_HEADER);
    CHECK(ring->initialized && !ring->enabled && !ring->zc_device && ring->recv_burst != NULL);
    CHECK(strcmp(ring->device_name, device) == 0 && ring->caplen == 128);
    CHECK(pfring_version(ring, &version) == 0 && version == RING_VERSION_NUM);
    CHECK(pfring_get_num_rx_channels(ring) == 1 && pfring_get_ring_id(ring) > 0);
    CHECK(pfring_get_slot_header_len(ring) == sizeof(struct pfring_pkthdr));
    CHECK(pfring_get_caplen(ring) == 128 && pfring_get_link_type(ring) == 1);
    CHECK(pfring_get_link_status(ring) == 1 && pfring_get_mtu_size(ring) >= 0);
    CHECK(pfring_get_card_settings(ring, &card) == 0 && card.rx_ring_slots > 100);
    CHECK(card.max_packet_size == 128);
    CHECK(pfring_get_bound_device_ifindex(ring, &index) < 0);
    CHECK(pfring_get_bound_device_address(ring, mac) < 0);
    CHECK(pfring_get_interface_speed(ring) == 0);
    CHECK(pfring_enable_rss_rehash(ring) == 0 && pfring_set_filtering_mode(ring, software_only) == 0);
    CHECK(pfring_set_direction(ring, rx_only_direction) == 0);
    CHECK(pfring_set_direction(ring, 7) == PF_RING_ERROR_INVALID_ARGUMENT);
    CHECK(pfring_set_direction(ring, rx_and_tx_direction) == 0);
    CHECK(pfring_set_bpf_filter(ring, "udp and and") == PF_RING_ERROR_INVALID_ARGUMENT);
    CHECK(pfring_set_bpf_filter(ring, "udp") == 0 && pfring_remove_bpf_filter(ring) == 0);
    CHECK(pfring_set_sampling_rate(ring, 0) == PF_RING_ERROR_INVALID_ARGUMENT);
    CHECK(pfring_set_socket_mode(ring, 7) == PF_RING_ERROR_INVALID_ARGUMENT);
    CHECK(pfring_set_socket_mode(ring, send_only_mode) == 0);
    CHECK(pfring_send(ring, (char *)frame, 60, 1) == PF_RING_ERROR_RING_NOT_ENABLED);
    CHECK(pfring_enable_ring(ring) == 0 && pfring_send(ring, (char *)frame, 60, 1) == 60);
    CHECK(pfring_recv(ring, &data, 0, &header, 0) == PF_RING_ERROR_NOT_SUPPORTED);
    CHECK(pfring_set_socket_mode(ring, recv_only_mode) == 0);
    CHECK(pfring_send(ring, (char *)frame, 60, 1) == PF_RING_ERROR_NOT_SUPPORTED);
    CHECK(pfring_recv(ring, &data, 0, &header, 1) == 1 && pfring_disable_ring(ring) == 0);
    CHECK(pfring_set_reflector_device(ring, "nosuch") < 0);
    CHECK(pfring_set_cluster(ring, 9, cluster_per_flow_2_tuple) == PF_RING_ERROR_NOT_SUPPORTED);
    CHECK(pfring_set_cluster(ring, 9, cluster_per_inner_flow_2_tuple) == PF_RING_ERROR_NOT_SUPPORTED);
    CHECK(pfring_set_cluster(ring, 8, cluster_per_inner_flow) == 0);
    CHECK(pfring_set_cluster(ring, 8, cluster_per_inner_flow_ip_5_tuple) == 0);
    CHECK(pfring_set_cluster(ring, 9, 99) == PF_RING_ERROR_INVALID_ARGUMENT);
    CHECK(pfring_set_cluster_consumer(ring, 9, 64, cluster_round_robin, 1) == 0);
    CHECK(pfring_remove_from_cluster(ring) == 0);
    CHECK(pfring_set_channel_id(ring, 5) == PF_RING_ERROR_INVALID_ARGUMENT);
    CHECK(pfring_set_channel_id(ring, 0) == 0);
    CHECK(pfring_set_channel_mask(ring, RING_ANY_CHANNEL) == 0);
    CHECK(pfring_next_pkt_time(ring, &ts) == PF_RING_ERROR_NO_PKT_AVAILABLE);
    pfring_close(ring);

    list = pfring_findalldevs();
    for (one = list; one != NULL; one = one->next)
        found += strstr(one->name, device) != NULL && strcmp(one->module, "vnplug") == 0;
    CHECK(found == 1);
    pfring_freealldevs(list);
    pfring_freealldevs(NULL);
}

static void refusing(void)
{
    char buffer[8];
    hw_filtering_rule rule;
    struct timespec ts;
    CHECK(pfring_send(ring, buffer, 8, 1) == PF_RING_ERROR_INVALID_ARGUMENT && errno == EINVAL);
    CHECK(pfring_send(ring, NULL, 60, 1) == PF_RING_ERROR_INVALID_ARGUMENT);
    CHECK(pfring_send_get_time(ring, buffer, 8, &ts) == PF_RING_ERROR_NOT_SUPPORTED);
    CHECK(pfring_send_last_rx_packet(ring, 1) == PF_RING_ERROR_WRONG_CONFIGURATION);
    CHECK(pfring_set_reflector_device(ring, NULL) < 0 && pfring_flush_tx_packets(NULL) < 0);
    CHECK(pfring_send(NULL, buffer, 8, 1) < 0 && pfring_set_tx_watermark(ring, 8) == 0);
    CHECK(pfring_flush_tx_packets(ring) == 0);
    CHECK(pfring_add_hw_rule(ring, &rule) == PF_RING_ERROR_NOT_SUPPORTED);
    CHECK(pfring_set_device_clock(ring, &ts) == PF_RING_ERROR_NOT_SUPPORTED);
    CHECK(pfring_set_promisc(ring, 1) == PF_RING_ERROR_NOT_SUPPORTED);
    CHECK(pfring_get_appl_stats_file_name(ring, buffer, 8) == NULL);
    CHECK(pfring_enable_ring(NULL) < 0 && pfring_recv(NULL, NULL, 0, NULL, 0) < 0);
    CHECK(pfring_poll(NULL, 0) < 0 && pfring_stats(ring, NULL) < 0);
    CHECK(pfring_get_selectable_fd(NULL) < 0 && pfring_loop(ring, NULL, NULL, 1) < 0);
    pfring_breakloop(NULL);
    pfring_shutdown(NULL);
}

static void waiting(const char *device)
{
    struct pfring_pkthdr h;
    struct timespec ts;
    u_char *p = NULL;
    struct epoll_event event = { .events = EPOLLIN };
    int epoll = epoll_create1(0), rounds, got;

    ring = opened(device, 0);
    refusing();
    CHECK(pfring_recv(ring, &p, 0, &h, 0) == PF_RING_ERROR_RING_NOT_ENABLED);
    CHECK(pfring_loop(ring, ignore, NULL, 1) == PF_RING_ERROR_RING_NOT_ENABLED);
    CHECK(pfring_get_selectable_fd(ring) == ring->fd);
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, ring->fd, &event) == 0);
    CHECK(epoll_wait(epoll, &event, 1, 0) == 0);
    /* The descriptor is the same when the port behind it is another. */
    CHECK(pfring_set_cluster(ring, 9, cluster_per_flow) == 0);
    CHECK(pfring_enable_ring(ring) == 0 && ring->enabled);
    CHECK(pfring_set_cluster(ring, 9, 0) == PF_RING_ERROR_INVALID_STATUS);
    /* One packet for each time the descriptor is readable. */
    for (rounds = 0; rounds < 200; rounds++) {
        CHECK(epoll_wait(epoll, &event, 1, 20000) == 1);
        got = pfring_recv(ring, &p, 0, &h, 0);
        CHECK(got == 0 || (got == 1 && h.caplen >= 60 && h.caplen <= 128));
    }
    CHECK(pfring_poll(ring, 20000) == 1 && pfring_is_pkt_available(ring) == 1);
    CHECK(pfring_next_pkt_time(ring, &ts) == 0);
    CHECK(pfring_recv(ring, &p, 0, &h, 0) == 1 && h.ts.tv_sec == ts.tv_sec);
    CHECK(pfring_disable_ring(ring) == 0);
    CHECK(pfring_recv(ring, &p, 0, &h, 0) == PF_RING_ERROR_RING_NOT_ENABLED);
    /* What was under way is read after the next enabling. */
    CHECK(pfring_set_bpf_filter(ring, "udp port 9999") == 0 && pfring_enable_ring(ring) == 0);
    do {
        got = pfring_recv(ring, &p, 0, &h, 0);
    } while (got == 1);
    CHECK(got == 0 && pfring_poll(ring, 10) == 0);
    close(epoll);
}

static void breaking(void)
{
    pthread_t thread;
    struct pfring_pkthdr h;
    u_char *p = NULL;

    /* The filter lets nothing pass, so everything waits. From a signal handler: */
    signal(SIGALRM, on_alarm);
    ualarm(100000, 0);
    CHECK(pfring_loop(ring, ignore, NULL, 1) == 0);
    ualarm(100000, 0);
    CHECK(pfring_recv(ring, &p, 0, &h, 1) == 0);
    /* From a thread: */
    CHECK(pthread_create(&thread, NULL, breaks, NULL) == 0);
    CHECK(pfring_loop(ring, ignore, NULL, 1) == 0);
    pthread_join(thread, NULL);
    /* Before the call: */
    pfring_breakloop(ring);
    CHECK(pfring_recv(ring, &p, 0, &h, 1) == 0);
    pfring_breakloop(ring);
    CHECK(pfring_loop(ring, ignore, NULL, 0) == 0);
    /* A shutdown ends everything, for good. */
    CHECK(pthread_create(&thread, NULL, breaks, (void *)1) == 0);
    CHECK(pfring_loop(ring, ignore, NULL, 1) < 0);
    pthread_join(thread, NULL);
    CHECK(pfring_recv(ring, &p, 0, &h, 1) < 0 && pfring_enable_ring(ring) < 0);
    CHECK(ring->is_shutting_down);
    pfring_close(ring);
}

static void closing(const char *device)
{
    pthread_t thread;
    ring = opened(device, 0);
    CHECK(pfring_set_bpf_filter(ring, "udp port 9999") == 0 && pfring_enable_ring(ring) == 0);
    CHECK(pthread_create(&thread, NULL, breaks, (void *)2) == 0);
    CHECK(pfring_loop(ring, ignore, NULL, 1) < 0);
    pthread_join(thread, NULL);
}

static void locking(const char *device)
{
    struct pfring_pkthdr h;
    u_char memory[64], *p = memory;
    pfring_packet_info info;
    ring = opened(device, PF_RING_REENTRANT);
    CHECK(pfring_enable_ring(ring) == 0);
    CHECK(pfring_recv(ring, &p, 0, &h, 1) == PF_RING_ERROR_INVALID_ARGUMENT);
    CHECK(pfring_recv_burst(ring, &info, 1, 1) == PF_RING_ERROR_INVALID_ARGUMENT);
    CHECK(pfring_recv(ring, &p, sizeof memory, &h, 1) == 1 && p == memory);
    CHECK(memory[12] == 0x08 || memory[12] == 0x86);
    CHECK(pfring_recv_parsed(ring, &p, 20, &h, 1, 4, 0, 0) == 2 && h.caplen > 20);
    pfring_close(ring);
}

static void ending(const char *device)
{
    struct pfring_pkthdr h;
    u_char *p = NULL;
    int got, count = 0;
    ring = opened(device, 0);
    CHECK(pfring_enable_ring(ring) == 0);
    while ((got = pfring_recv(ring, &p, 0, &h, 1)) == 1)
        count++;
    CHECK(got == -1 && errno == ENODATA && count == 1000);
    CHECK(pfring_loop(ring, ignore, NULL, 1) == -1 && pfring_poll(ring, 1000) == -1);
    pfring_close(ring);
}

static void helping(void)
{
    char text[64], line[512];
    u_char packet[60] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0x12, 0x34 };
    struct pfring_pkthdr h;
    struct timespec ts;
    CHECK(strcmp(pfring_format_numbers(1234567.891, text, sizeof text, 1), "1'234'567.89") == 0);
    CHECK(pfring_format_numbers(5, NULL, 0, 0) == NULL);
    CHECK(strcmp(pfring_format_numbers(123, text, 2, 0), "1") == 0);
    memset(&h, 0, sizeof h);
    CHECK(pfring_parse_pkt(packet, &h, 4, 1, 1) == 1 && h.ts.tv_sec != 0);
    h.caplen = 60;
    CHECK(pfring_parse_pkt(packet, &h, 4, 0, 1) == 2);
    CHECK(h.extended_hdr.parsed_pkt.eth_type == 0x1234);
    CHECK(pfring_print_pkt(line, sizeof line, packet, 60, 60) == (int)strlen(line));
    CHECK(strstr(line, "[eth_type=0x1234]") != NULL);
    CHECK(pfring_read_ixia_hw_timestamp(packet, 60, &ts) == 0);
    setenv("TZ", "XXX-2", 1);
    tzset();
    CHECK(gmt_to_local(0) == 7200);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    helping();
    opening(argv[1]);
    knowing(argv[1]);
    waiting(argv[1]);
    breaking();
    closing(argv[1]);
    locking(argv[1]);
    ending(argv[2]);
    printf("all calls\n");
    return 0;
}
