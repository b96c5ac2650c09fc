/*
 * Counts packets as programs for PF_RING do: options on the command line, one way of receiving, a
 * line of results at the end. Written against the API's documentation.
 *
 *   -i device  -n packets  -l caplen  -f filter  -c cluster  -H cluster-type  -w watermark
 *   -p poll-ms  -e direction  -s sampling  -V vlan  -m (long header)
 *   -r recv|copy|parsed|burst|loop|poll
 *   -a (active)  -t threads
 *   -g (reads when its input has a line)  -b (says `begun` at the first packet)
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pfring.h"

static pfring *ring;
static volatile sig_atomic_t stop;
static unsigned long wanted = ~0ul;
static unsigned long packets, bytes, captured, udp, tcp, other, ipv6, backwards, bad;
static unsigned long long last_ns;
static int long_header, threads_done, announces;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void leave(int signal)
{
    pfring_stat stats;
    (void)signal;
    stop = 1;
    pfring_stats(ring, &stats); /* as pfcount does, in its handler */
    pfring_breakloop(ring);
}

static void see(const struct pfring_pkthdr *h, const u_char *p)
{
    packets++;
    if (announces && packets == 1) {
        printf("begun\n");
        fflush(stdout);
    }
    bytes += h->len;
    captured += h->caplen;
    if (h->caplen < 14)
        return;
    if (h->extended_hdr.timestamp_ns < last_ns)
        backwards++;
    last_ns = h->extended_hdr.timestamp_ns;
    if (h->extended_hdr.timestamp_ns / 1000000000 != (u_int64_t)h->ts.tv_sec)
        bad++;
    if (long_header) {
        const struct pkt_parsing_info *found = &h->extended_hdr.parsed_pkt;
        if (found->eth_type != (p[12] << 8 | p[13]) && found->vlan_id == 0)
            bad++;
        udp += found->l3_proto == 17;
        tcp += found->l3_proto == 6;
        other += found->l3_proto != 6 && found->l3_proto != 17;
        ipv6 += found->ip_version == 6;
    }
}

static void each(const struct pfring_pkthdr *h, const u_char *p, const u_char *user)
{
    if (user != (const u_char *)"user")
        bad++;
    see(h, p);
    if (packets == wanted)
        pfring_breakloop(ring);
}

static void *copying(void *user)
{
    u_char memory[2048], *buffer = memory;
    struct pfring_pkthdr h;
    (void)user;
    while (!stop) {
        int got = pfring_recv(ring, &buffer, sizeof memory, &h, 1);
        pthread_mutex_lock(&lock);
        if (got > 0)
            see(&h, buffer);
        if (got < 0 || packets >= wanted) {
            stop = 1;
            pfring_breakloop(ring);
        }
        pthread_mutex_unlock(&lock);
    }
    __sync_fetch_and_add(&threads_done, 1);
    return NULL;
}

static int receive(const char *how, int wait)
{
    struct pfring_pkthdr h;
    u_char memory[2048], *buffer = NULL;
    pfring_packet_info burst[32];
    int got = 0;

    memset(&h, 0, sizeof h);
    if (strcmp(how, "loop") == 0)
        return pfring_loop(ring, each, (const u_char *)"user", wait);
    while (!stop && packets < wanted) {
        if (strcmp(how, "burst") == 0) {
            unsigned room = wanted - packets < 32 ? wanted - packets : 32;
            got = pfring_recv_burst(ring, burst, room, wait);
            for (int i = 0; i < got; i++) {
                packets++;
                bytes += burst[i].len;
                captured += burst[i].caplen;
                bad += burst[i].data == NULL || burst[i].ts.tv_sec == 0;
            }
        } else if (strcmp(how, "parsed") == 0) {
            got = pfring_recv_parsed(ring, &buffer, 0, &h, wait, 4, 1, 1);
            long_header = 1;
            if (got > 0)
                see(&h, buffer);
        } else if (strcmp(how, "copy") == 0) {
            buffer = memory;
            got = pfring_recv(ring, &buffer, sizeof memory, &h, wait);
            if (got > 0)
                see(&h, buffer);
        } else {
            if (strcmp(how, "poll") == 0) {
                got = pfring_poll(ring, 100);
                if (got < 0 && errno == EINTR)
                    continue;
                if (got <= 0)
                    goto next;
            }
            got = pfring_recv(ring, &buffer, 0, &h, wait);
            if (got > 0)
                see(&h, buffer);
        }
    next:
        if (got < 0)
            return got;
    }
    return 0;
}

int main(int argc, char **argv)
{
    const char *device = "eth0", *filter = NULL, *how = "recv";
    int option, rc, cluster = 0, type = cluster_per_flow_5_tuple, watermark = 0, poll_ms = 0;
    int direction = 0, sampling = 0, vlan = -1, wait = 1, threads = 0, gated = 0;
    u_int32_t caplen = 1536, flags = PF_RING_PROMISC;
    pfring_stat stats;

    while ((option = getopt(argc, argv, "i:n:l:f:c:H:w:p:e:s:V:mr:at:gb")) != -1) {
        switch (option) {
        case 'i': device = optarg; break;
        case 'n': wanted = strtoul(optarg, NULL, 10); break;
        case 'l': caplen = atoi(optarg); break;
        case 'f': filter = optarg; break;
        case 'c': cluster = atoi(optarg); break;
        case 'H': type = atoi(optarg); break;
        case 'w': watermark = atoi(optarg); break;
        case 'p': poll_ms = atoi(optarg); break;
        case 'e': direction = atoi(optarg); break;
        case 's': sampling = atoi(optarg); break;
        case 'V': vlan = atoi(optarg); break;
        case 'm': long_header = 1; flags |= PF_RING_LONG_HEADER; break;
        case 'r': how = optarg; break;
        case 'a': wait = 0; break;
        case 'g': gated = 1; break;
        case 'b': announces = 1; break;
        case 't': threads = atoi(optarg); flags |= PF_RING_REENTRANT; break;
        default: return 2;
        }
    }
    ring = pfring_open(device, caplen, flags);
    if (ring == NULL) {
        printf("open: %s\n", strerror(errno));
        return 3;
    }
    pfring_set_application_name(ring, "count");
    if ((rc = pfring_set_direction(ring, direction)) != 0)
        printf("direction %d\n", rc);
    if ((rc = pfring_set_socket_mode(ring, recv_only_mode)) != 0)
        printf("mode %d\n", rc);
    if (filter && (rc = pfring_set_bpf_filter(ring, filter)) != 0)
        printf("filter %d\n", rc);
    if (vlan >= 0 && (rc = pfring_set_vlan_id(ring, vlan)) != 0)
        printf("vlan %d\n", rc);
    if (cluster && (rc = pfring_set_cluster(ring, cluster, type)) != 0)
        printf("cluster %d\n", rc);
    if (watermark && (rc = pfring_set_poll_watermark(ring, watermark)) != 0)
        printf("watermark %d\n", rc);
    if (poll_ms && (rc = pfring_set_poll_duration(ring, poll_ms)) != 0)
        printf("duration %d\n", rc);
    if (sampling && (rc = pfring_set_sampling_rate(ring, sampling)) != 0)
        printf("sampling %d\n", rc);
    signal(SIGINT, leave);
    signal(SIGALRM, leave);
    if ((rc = pfring_enable_ring(ring)) != 0) {
        printf("enable %d\n", rc);
        return 4;
    }
    printf("ready\n");
    fflush(stdout);
    if (gated)
        getchar();
    if (threads) {
        pthread_t all[16];
        for (int i = 0; i < threads; i++)
            pthread_create(&all[i], NULL, copying, NULL);
        for (int i = 0; i < threads; i++)
            pthread_join(all[i], NULL);
        rc = threads_done == threads ? 0 : -1;
    } else {
        rc = receive(how, wait);
    }
    pfring_stats(ring, &stats);
    printf("rc %d packets %lu bytes %lu captured %lu recv %llu drop %llu udp %lu tcp %lu other %lu "
           "ipv6 %lu backwards %lu bad %lu\n",
           rc, packets, bytes, captured, (unsigned long long)stats.recv,
           (unsigned long long)stats.drop, udp, tcp, other, ipv6, backwards, bad);
    pfring_close(ring);
    return 0;
}
