/*
 * What one handle sends, others on the device see, and it does not see itself. It ends with 0 and
 * "ok", or says what was wrong.
 *
 *     seen inject DEVICE COUNT    one handle sends COUNT frames, another sees them and sends one back
 *     seen listen DEVICE COUNT    says "listening", then sees COUNT frames of "seen inject"
 */
#define _GNU_SOURCE
#include <pcap/pcap.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                                             \
    do {                                                                                        \
        if (!(what)) {                                                                          \
            fprintf(stderr, "line %d: not %s: %s %s\n", __LINE__, #what, errbuf, said(p, q)); \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)

static char errbuf[PCAP_ERRBUF_SIZE];
static pcap_t *p, *q;

static const char *said(pcap_t *one, pcap_t *other)
{
    return one && *pcap_geterr(one) ? pcap_geterr(one) : other ? pcap_geterr(other) : "";
}

static pcap_t *open_device(const char *device, const char *filter)
{
    struct bpf_program program;
    pcap_t *it = pcap_create(device, errbuf);
    CHECK(it && pcap_set_timeout(it, 20) == 0 && pcap_activate(it) == 0);
    CHECK(pcap_compile(it, &program, filter, 1, PCAP_NETMASK_UNKNOWN) == 0);
    CHECK(pcap_setfilter(it, &program) == 0);
    pcap_freecode(&program);
    return it;
}

/* The next frame, which has this number. */
static void sees(pcap_t *it, unsigned number)
{
    struct pcap_pkthdr *header;
    const u_char *bytes;
    int status;
    while ((status = pcap_next_ex(it, &header, &bytes)) == 0)
        ;
    CHECK(status == 1 && header->caplen == 60 && header->len == 60);
    CHECK(header->ts.tv_sec > 0 && memcmp(bytes, "\x02\0\0\0\0\x01\x02\0\0\0\0\x02\x88\xb5", 14) == 0);
    CHECK(bytes[14] == (u_char)number);
}

int main(int argc, char **argv)
{
    u_char frame[60] = "\x02\0\0\0\0\x01\x02\0\0\0\0\x02\x88\xb5";
    CHECK(argc == 4);
    const char *device = argv[2];
    unsigned count = (unsigned)atoi(argv[3]);
    p = open_device(device, "ether proto 0x88b5");
    if (strcmp(argv[1], "listen") == 0) {
        puts("listening");
        fflush(stdout);
        for (unsigned number = 0; number < count; number++)
            sees(p, number);
    } else {
        /* Every frame passes this filter, too, and the daemon runs it otherwise. */
        q = open_device(device, "len >= 60 and ether[12:2] = 0x88b5");
        for (unsigned number = 0; number < count; number++) {
            frame[14] = (u_char)number;
            CHECK(pcap_inject(p, frame, sizeof frame) == sizeof frame);
        }
        for (unsigned number = 0; number < count; number++)
            sees(q, number);
        frame[14] = (u_char)count;
        CHECK(pcap_sendpacket(q, frame, sizeof frame) == 0);
        /* The first that it sees is what the other one sent. */
        sees(p, count);
        pcap_close(q);
    }
    pcap_close(p);
    puts("ok");
    return 0;
}
