/*
 * Reads a device of vnplugd with the C library alone: an example for those who write a reader in
 * another language, or without libvnplug. It follows docs/control-protocol.md and docs/ring-format.md,
 * and needs nothing that they do not say. For a little-endian machine.
 *
 *     cc -std=c11 -D_GNU_SOURCE -O2 raw_reader.c -o raw_reader && ./raw_reader -n 1000 host:eth1
 *
 *   -s socket   -r bytes of the ring   -f filter   -n packets, then it closes the port; 0 = to the end
 *   -g filter that replaces the first one after -n packets, of which it then reads -n more
 *   -w watermark   -d longest delay in microseconds   -p pause per packet in microseconds
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static _Noreturn void fail(const char *what)
{
    fprintf(stderr, "%s%s%s\n", what, errno ? ": " : "", errno ? strerror(errno) : "");
    exit(1);
}

/* ---- messages: docs/control-protocol.md, "Framing" and "Messages" ---- */

enum { HELLO = 1, WELCOME, ERROR, OPEN = 6, OPENED, FILTER, DONE, CLOSE = 12, GONE = 14 };

struct message { uint32_t kind, len, at; unsigned char bytes[8192]; };

static void put(struct message *m, const void *value, size_t len)
{
    if (len > sizeof m->bytes - m->len)
        fail("a message is too long");
    memcpy(m->bytes + m->len, value, len);
    m->len += (uint32_t)len;
}
static void put_u8(struct message *m, uint8_t value) { put(m, &value, 1); }
static void put_u32(struct message *m, uint32_t value) { put(m, &value, 4); }
static void put_u64(struct message *m, uint64_t value) { put(m, &value, 8); }
static void put_text(struct message *m, const char *text)
{
    put_u32(m, (uint32_t)strlen(text));
    put(m, text, strlen(text));
}
static void put_filter(struct message *m, const char *text)
{
    put_u8(m, *text ? 1 : 0);
    put_text(m, text);
}

static const void *get(struct message *m, size_t len)
{
    if (len > m->len - m->at)
        fail("a message is too short");
    m->at += (uint32_t)len;
    return m->bytes + m->at - len;
}
static uint32_t get_u32(struct message *m) { uint32_t v; memcpy(&v, get(m, 4), 4); return v; }
static uint64_t get_u64(struct message *m) { uint64_t v; memcpy(&v, get(m, 8), 8); return v; }

/* Reads `len` bytes; descriptors come with the first byte of a message. */
static void receive(int socket, void *to, size_t len, int *fds, int *count)
{
    for (size_t got = 0; got < len;) {
        union { struct cmsghdr align; char space[CMSG_SPACE(4 * sizeof(int))]; } control;
        struct iovec part = { (char *)to + got, len - got };
        struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
                                 .msg_controllen = sizeof control };
        ssize_t n = recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
        if (n <= 0)
            fail("the daemon closed the connection");
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
            int here = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            if (c->cmsg_type != SCM_RIGHTS || *count + here > 4)
                fail("descriptors that nobody asked for");
            memcpy(fds + *count, CMSG_DATA(c), (size_t)here * sizeof(int));
            *count += here;
        }
        got += (size_t)n;
    }
}

/* Sends a request and waits for its answer, which must be of this kind. */
static void ask(int socket, struct message *m, uint32_t kind, int *fds, int *count)
{
    static uint32_t last_id;
    uint32_t head[6] = { 0x43504e56, 1 | m->kind << 8, m->len, ++last_id, 0, 0 }; /* "VNPC" */
    head[5] = head[0] ^ head[1] ^ head[2] ^ head[3] ^ head[4] ^ 0x76506c67;
    if (send(socket, head, sizeof head, MSG_NOSIGNAL) != sizeof head
        || send(socket, m->bytes, m->len, MSG_NOSIGNAL) != (ssize_t)m->len)
        fail("cannot send a request");
    do { /* what has the id 0 was not asked for */
        errno = 0;
        receive(socket, head, sizeof head, fds, count);
        if (head[0] != 0x43504e56 || (head[1] & 0xff) != 1 || head[2] > sizeof m->bytes
            || (head[0] ^ head[1] ^ head[2] ^ head[3] ^ head[4] ^ head[5]) != 0x76506c67)
            fail("not the protocol");
        *m = (struct message){ .kind = head[1] >> 8 & 0xff, .len = head[2] };
        receive(socket, m->bytes, m->len, fds, count);
    } while (head[3] != last_id);
    if (m->kind == ERROR) {
        uint16_t code;
        memcpy(&code, get(m, 2), 2);
        uint32_t len = get_u32(m);
        fprintf(stderr, "refused (%u): %.*s\n", code, (int)len, (const char *)get(m, len));
        exit(1);
    }
    if (m->kind != kind)
        fail("not the answer");
}

/* ---- the ring: docs/ring-format.md ---- */

struct ring {
    unsigned char *words, *records; /* the first 0x1000 bytes; the record area */
    uint64_t capacity, epoch, head, tail, read;
    uint32_t snaplen, seq;
};
struct record { uint32_t cap_len, wire_len; uint64_t ts_ns; uint32_t flow_hash, lost;
                uint16_t flags, vlan_tci, source, queue; };

#define WORD(r, at) ((_Atomic uint64_t *)(void *)((r)->words + (at)))
#define HALF(r, at) ((_Atomic uint32_t *)(void *)((r)->words + (at)))
static uint64_t load(struct ring *r, int at) { return atomic_load_explicit(WORD(r, at), memory_order_acquire); }
static void store(struct ring *r, int at, uint64_t v) { atomic_store_explicit(WORD(r, at), v, memory_order_release); }

static void attach(struct ring *r, uint64_t len)
{
    uint16_t major;
    if (len < 0x2000 || load(r, 0) != 0x474e49524c504e56) /* "VNPLRING" */
        fail("no ring");
    memcpy(&major, r->words + 0x08, 2);
    memcpy(&r->epoch, r->words + 0x10, 8);
    memcpy(&r->capacity, r->words + 0x18, 8);
    memcpy(&r->snaplen, r->words + 0x28, 4);
    if (major != 1 || r->capacity < 4096 || r->capacity & (r->capacity - 1) || r->capacity > len - 0x1000)
        fail("not a ring of version 1");
    r->head = r->tail = load(r, 0x100);
    r->read = load(r, 0x108);
    r->seq = atomic_load(HALF(r, 0x188));
}

static void refresh(struct ring *r)
{
    uint64_t head = load(r, 0x80);
    if (head - r->tail <= r->capacity)
        r->head = head;
}

/* The next record; NULL if nothing more is published. Its bytes stay until it is released. */
static const unsigned char *next(struct ring *r, struct record *record)
{
    uint64_t at = r->tail & (r->capacity - 1), size;
    if (r->tail == r->head)
        refresh(r);
    if (r->tail == r->head)
        return NULL;
    memcpy(record, r->records + at, 4);
    if (record->cap_len == UINT32_MAX) { /* a pad: on at the start of the area */
        if (r->capacity - at >= r->head - r->tail)
            fail("a pad with nothing behind it");
        r->tail += r->capacity - at;
        at = 0;
        memcpy(record, r->records, 4);
    }
    size = (sizeof *record + (uint64_t)record->cap_len + 7) & ~(uint64_t)7;
    if (record->cap_len > r->snaplen || size > r->head - r->tail || size > r->capacity - at)
        fail("a record that cannot be");
    memcpy(record, r->records + at, sizeof *record);
    r->tail += size;
    r->read += 1;
    return r->records + at + sizeof *record;
}

static void release(struct ring *r)
{
    store(r, 0x100, r->tail);
    store(r, 0x108, r->read);
}

static int life(struct ring *r)
{
    uint64_t word = load(r, 0x98);
    return (word & ~(uint64_t)0xff) == r->epoch ? (int)(word & 0xff) : 2;
}

/* Asks to be rung. Milliseconds to sleep for the doorbell: 0 = do not, -1 = as long as it takes. */
static int arm(struct ring *r, uint32_t watermark, uint32_t max_delay_us)
{
    release(r);
    for (;;) {
        uint64_t published, wake_at = r->read + watermark;
        atomic_store_explicit(WORD(r, 0x180), wake_at, memory_order_relaxed);
        atomic_store_explicit(HALF(r, 0x18c), max_delay_us, memory_order_relaxed);
        atomic_store_explicit(HALF(r, 0x188), ++r->seq, memory_order_release);
        atomic_thread_fence(memory_order_seq_cst);
        published = load(r, 0x88);
        refresh(r);
        int unread = r->head != r->tail, reached = (int64_t)(published - wake_at) >= 0;
        if (life(r) != 0 || (unread && (reached || r->head - r->tail > r->capacity / 2)))
            return 0;
        if (unread) /* rounded up: a millisecond late, never a loop that spins */
            return (int)((max_delay_us + 999) / 1000);
        if (!reached)
            return -1;
        r->read = published; /* an earlier reader died between tail and read */
    }
}

/* ---- the program ---- */

static const char *socket_path = "/run/vnplug/vnplug.sock", *filter = "", *second_filter;
static uint64_t ring_bytes, packets, received, lost, missing, strange, expected;
static uint32_t watermark = 1, max_delay_us = 10000, pause_us;
static uint64_t by_protocol[256];

/* Counts a packet; frames of the generator are numbered (docs/sources.md, "gen"). */
static void look(const struct record *record, const unsigned char *bytes)
{
    uint64_t number = 0;
    received += 1;
    lost += record->lost;
    if (record->cap_len < 60 || record->cap_len != record->wire_len)
        return;
    by_protocol[bytes[23]] += 1;
    const unsigned char *trailer = bytes + record->cap_len - 18;
    if (memcmp(trailer, "\x76\x57", 2) != 0)
        return;
    for (int i = 6; i < 14; i++)
        number = number << 8 | trailer[i];
    if (received > 1) {
        missing += number - expected;
        strange += number < expected || number - expected != record->lost;
    }
    expected = number + 1;
    if (pause_us)
        usleep(pause_us);
}

/* Reads until `enough` packets were received or the ring is over; what was published is read. */
static void read_until(struct ring *r, int bell, int socket, uint64_t enough)
{
    struct record record;
    const unsigned char *bytes;
    for (int over = 0; !over && received < enough;) {
        char drain[64];
        while (read(bell, drain, sizeof drain) > 0) /* does not wait: EAGAIN ends it */
            ;
        over = life(r) != 0; /* before the last look for records */
        while (received < enough && (bytes = next(r, &record)) != NULL) {
            look(&record, bytes);
            if (r->read % 64 == 0)
                release(r);
        }
        int ms = over || received >= enough ? 0 : arm(r, watermark, max_delay_us);
        struct pollfd wait[2] = { { .fd = bell, .events = POLLIN }, { .fd = socket, .events = POLLRDHUP } };
        if (ms != 0 && poll(wait, 2, ms) > 0 && wait[1].revents)
            errno = 0, fail("the daemon is gone"); /* a daemon that is killed leaves the ring open */
    }
}

int main(int argc, char **argv)
{
    for (int option; (option = getopt(argc, argv, "s:r:f:g:n:w:d:p:")) >= 0;)
        switch (option) {
        case 's': socket_path = optarg; break;
        case 'r': ring_bytes = strtoull(optarg, NULL, 0); break;
        case 'f': filter = optarg; break;
        case 'g': second_filter = optarg; break;
        case 'n': packets = strtoull(optarg, NULL, 0); break;
        case 'w': watermark = (uint32_t)strtoul(optarg, NULL, 0); break;
        case 'd': max_delay_us = (uint32_t)strtoul(optarg, NULL, 0); break;
        case 'p': pause_us = (uint32_t)strtoul(optarg, NULL, 0); break;
        default: return 2;
        }
    if (optind + 1 != argc)
        return 2;
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    strncpy(address.sun_path, socket_path, sizeof address.sun_path - 1);
    int line = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), fds[4], count = 0;
    if (line < 0 || connect(line, (struct sockaddr *)&address, sizeof address) != 0)
        fail(socket_path);

    struct message m = { .kind = HELLO };
    put_u8(&m, 1), put_u8(&m, 1), put_u8(&m, 0); /* versions 1 to 1, a client */
    put_text(&m, "raw_reader");
    put_u32(&m, 0), put_u32(&m, 0); /* no places, no vectors */
    ask(line, &m, WELCOME, fds, &count);

    m = (struct message){ .kind = OPEN };
    put_text(&m, argv[optind]);
    put_u64(&m, ring_bytes);
    put_u32(&m, 0);                                     /* snaplen: whole frames */
    put_u8(&m, 0), put_u32(&m, 0), put_u8(&m, 1);       /* both directions, all of them, enabled */
    put_filter(&m, filter);
    put_text(&m, ""), put_u8(&m, 0), put_u8(&m, 0);     /* no cluster; not reopened */
    put_text(&m, "raw_reader");
    put_u64(&m, 0), put_text(&m, ""), put_u64(&m, 0);   /* nothing to send, no group */
    put_u8(&m, 0), put_u8(&m, 1);                       /* a doorbell of its own; records apart */
    ask(line, &m, OPENED, fds, &count);
    uint32_t port = get_u32(&m);
    get_u64(&m);                                        /* map_len: of both in one piece */
    if (get_u32(&m) != 1)
        fail("more than one ring: name one receive queue, as in host:eth1@0");
    get_u64(&m);
    uint64_t len = get_u64(&m);
    if (count != 3 || len < 0x2000)
        fail("no ring of this daemon's: is it older than this program?");
    /* Ring 0: its page begins the words' memory, its record area the records'. */
    int bell = fds[2];
    unsigned char *words = mmap(NULL, 0x1000, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    unsigned char *records = mmap(NULL, len - 0x1000, PROT_READ, MAP_SHARED, fds[1], 0);
    if (words == MAP_FAILED || records == MAP_FAILED)
        fail("cannot map the ring");
    struct ring ring = { .words = words, .records = records };
    attach(&ring, len);

    read_until(&ring, bell, line, packets ? packets : UINT64_MAX);
    if (second_filter) {
        struct record record;
        m = (struct message){ .kind = FILTER };
        put_u32(&m, port);
        put_filter(&m, second_filter);
        ask(line, &m, DONE, fds, &count);
        /* What the old filter let pass is published by now; it is read, and not counted. */
        for (refresh(&ring); ring.tail != ring.head;)
            lost += next(&ring, &record) ? record.lost : 0;
        memset(by_protocol, 0, sizeof by_protocol);
        read_until(&ring, bell, line, 2 * packets);
    }
    uint64_t dropped = load(&ring, 0x90); /* after Close the memory may be empty */
    if (life(&ring) == 0) {
        m = (struct message){ .kind = CLOSE };
        put_u32(&m, port);
        ask(line, &m, DONE, fds, &count);
    }
    printf("received %" PRIu64 " lost %" PRIu64 " missing %" PRIu64 " strange %" PRIu64 " dropped %" PRIu64
           " tcp %" PRIu64 " udp %" PRIu64 " life %d\n", received, lost, missing, strange,
           dropped, by_protocol[6], by_protocol[17], life(&ring));
    return 0;
}
