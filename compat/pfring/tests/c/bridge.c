/*
 * Sends what it receives on -a through -b: by pfring_send (-p), by pfring_send_last_rx_packet, or by
 * a reflector (-r), until -n packets came. -l: measures the way from -b to -a with -n frames.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "pfring.h"

static u_int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (u_int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static pfring *opened(char *device, int flags, socket_mode mode)
{
    pfring *ring = pfring_open(device, 1536, PF_RING_LONG_HEADER | flags);
    if (ring == NULL) {
        perror(device);
        exit(1);
    }
    if (pfring_set_socket_mode(ring, mode) != 0)
        perror("mode");
    return ring;
}

/* Frames with the time in them, one after the other; nothing is asked to wait. */
static int latency(char *a, char *b, int packets)
{
    pfring *to = opened(b, 0, send_and_recv_mode), *from = opened(a, 0, recv_only_mode);
    u_int64_t most = 0, sum = 0;
    pfring_set_direction(from, rx_only_direction);
    pfring_set_poll_watermark(from, 0);
    if (pfring_set_bpf_filter(from, "ether proto 0x88b5") != 0 || pfring_enable_ring(to) != 0
        || pfring_enable_ring(from) != 0)
        return 1;
    for (int i = 0; i < packets; i++) {
        u_char frame[60] = { 2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x88, 0xb5 }, *buffer;
        struct pfring_pkthdr header;
        u_int64_t began = now(), took;
        memcpy(frame + 14, &began, sizeof began);
        if (pfring_send(to, (char *)frame, sizeof frame, 1) != sizeof frame)
            return 1;
        while (pfring_recv(from, &buffer, 0, &header, 0) == 0)
            ;
        if (header.len != sizeof frame || memcmp(buffer, frame, sizeof frame) != 0)
            return 1;
        took = now() - began;
        sum += took;
        most = took > most ? took : most;
    }
    printf("packets %d most_us %d mean_us %d\n", packets, (int)(most / 1000),
           (int)(sum / packets / 1000));
    pfring_close(to);
    pfring_close(from);
    return 0;
}

int main(int argc, char **argv)
{
    char *a = NULL, *b = NULL, way = 'b';
    int option, index = 0, packets = 1, failed = 0, back, none;
    pfring *from, *to = NULL;
    while ((option = getopt(argc, argv, "a:b:n:prl")) >= 0)
        switch (option) {
        case 'a': a = optarg; break;
        case 'b': b = optarg; break;
        case 'n': packets = atoi(optarg); break;
        default: way = (char)option; break;
        }
    if (way == 'l')
        return latency(a, b, packets);
    from = opened(a, way == 'b' ? PF_RING_RX_PACKET_BOUNCE : 0, recv_only_mode);
    pfring_set_direction(from, rx_only_direction);
    pfring_set_bpf_filter(from, "udp");
    if (way == 'p') {
        to = opened(b, 0, send_only_mode);
        if (pfring_enable_ring(to) != 0)
            return 1;
    } else if (way == 'r') {
        if (pfring_set_reflector_device(from, b) != 0)
            return 1;
    } else if (pfring_get_device_ifindex(from, b, &index) != 0) {
        return 1;
    }
    none = way == 'b' ? pfring_send_last_rx_packet(from, index) : 0;
    if (pfring_enable_ring(from) != 0)
        return 1;
    puts("ready");
    fflush(stdout);
    for (int i = 0; i < packets; i++) {
        struct pfring_pkthdr header;
        u_char *buffer;
        int rc = 0;
        if (pfring_recv(from, &buffer, 0, &header, 1) <= 0)
            return 1;
        if (way == 'p')
            while ((rc = pfring_send(to, (char *)buffer, header.caplen, 1)) < 0 && rc != -2)
                ;
        else if (way == 'b')
            while ((rc = pfring_send_last_rx_packet(from, index)) < 0 && rc != -2)
                ;
        failed += rc < 0;
    }
    pfring_get_bound_device_ifindex(from, &index);
    back = way == 'b' ? pfring_send_last_rx_packet(from, index) : 0;
    printf("packets %d failed %d none %d back %d\n", packets, failed, none, back);
    pfring_close(from);
    pfring_close(to);
    return 0;
}
