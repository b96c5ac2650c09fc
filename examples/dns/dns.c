/*
 * vnplug-dns: a back-end that tells programs in guests of the DNS transactions on a host's wire, as JSON.
 *
 *     vnplug-dns ID NAME DEVICE          for example: vnplug-dns 86 dns host:eth1
 *
 * README.md says what it tells. Every byte of a packet is a stranger's: reads are bounded by `struct
 * bytes`, names by their length and by pointers that only go back.
 */
#include <arpa/inet.h>
#include <ctype.h>
#include <err.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vnplug.h>

enum {
    NAME = 255,       /* a name's longest text, RFC 1035 3.1 */
    ANSWERS = 16,     /* told of at most */
    PENDING = 8192,   /* questions that are remembered; a new one takes the place of another */
    PROGRAMS = 1024,  /* the daemon permits no more by default */
    JSON = 8 * 1024,  /* a message's room: 17 names, 18 addresses and the words around fit */
};

/* Bytes that are read in order. After a read beyond the end `bad` is set and reads are 0. */
struct bytes {
    const uint8_t *data;
    size_t len, at;
    int bad;
};

struct question {
    uint8_t client[16], server[16];
    uint32_t client_port, id;
    uint64_t ts_ns; /* 0: the place is free */
};

struct program {
    uint32_t channel; /* 0: the place is free */
    uint32_t lost;
    char under[NAME + 1];
};

/* A packet as far as it is understood. */
struct packet {
    int family;          /* AF_INET or AF_INET6 */
    uint8_t ends[2][16]; /* source and target */
    uint16_t ports[2];
    struct bytes dns;
};

static struct question questions[PENDING];
static struct program programs[PROGRAMS];

/* The next bytes, or NULL. */
static const uint8_t *skip(struct bytes *from, size_t count)
{
    if (from->bad || count > from->len - from->at) {
        from->bad = 1;
        return NULL;
    }
    from->at += count;
    return from->data + from->at - count;
}

static uint16_t take(struct bytes *from, size_t count)
{
    const uint8_t *at = skip(from, count);
    return at == NULL ? 0 : count == 1 ? *at : (uint16_t)(at[0] << 8 | at[1]);
}

/* Reads a name, in lower case, odd bytes as '?'. A pointer must point before where the name began or the last
 * pointer led, so that there is no loop. */
static void take_name(struct bytes *from, char name[NAME + 1])
{
    struct bytes at = *from;
    size_t len = 0, barrier = from->at;
    int jumped = 0;
    while (!at.bad) {
        uint16_t label = take(&at, 1);
        if (label >= 0xc0) {
            size_t target = (size_t)(label & 0x3f) << 8 | take(&at, 1);
            if (!jumped)
                from->at = at.at;
            jumped = 1;
            at.bad |= target >= barrier;
            barrier = at.at = target;
        } else if (label == 0 || label > 63 || len + label + 1 > NAME) {
            at.bad |= label != 0;
            break;
        } else {
            if (len > 0)
                name[len++] = '.';
            for (; label > 0; label--) {
                int byte = tolower(take(&at, 1));
                name[len++] = isalnum(byte) || byte == '-' || byte == '_' ? (char)byte : '?';
            }
        }
    }
    name[len] = 0;
    from->bad |= at.bad;
    if (!jumped)
        from->at = at.at;
}

/* Ethernet, VLAN tags, IPv4 or IPv6 without extension headers, UDP. 0: it is something else. */
static int understand(const struct vnplug_packet *frame, struct packet *packet)
{
    struct bytes at = {.data = frame->data, .len = frame->cap_len};
    const uint8_t *ip;
    uint16_t type = 0x8100;

    memset(packet, 0, sizeof *packet);
    for (skip(&at, 12); type == 0x8100 || type == 0x88a8; type = take(&at, 2))
        if (at.at > 12)
            skip(&at, 2);
    if (type == 0x0800 && (ip = skip(&at, 20)) != NULL && ip[0] >= 0x45 && ip[9] == 17 &&
        ((ip[6] & 0x1f) | ip[7]) == 0) {
        packet->family = AF_INET;
        memcpy(packet->ends[0], ip + 12, 4);
        memcpy(packet->ends[1], ip + 16, 4);
        skip(&at, (ip[0] & 0xfu) * 4 - 20);
    } else if (type == 0x86dd && (ip = skip(&at, 40)) != NULL && ip[6] == 17) {
        packet->family = AF_INET6;
        memcpy(packet->ends[0], ip + 8, 16);
        memcpy(packet->ends[1], ip + 24, 16);
    } else {
        return 0;
    }
    packet->ports[0] = take(&at, 2);
    packet->ports[1] = take(&at, 2);
    skip(&at, 4);
    packet->dns = (struct bytes){.data = at.data + at.at, .len = at.len - at.at, .bad = at.bad};
    return !at.bad;
}

static int is_under(const char *name, const char *under)
{
    size_t len = strlen(name), tail = strlen(under);
    return tail == 0 || (len >= tail && strcmp(name + len - tail, under) == 0 &&
                         (len == tail || name[len - tail - 1] == '.'));
}

/* Tells each program that wants it. What is full is counted: a slow program delays nobody. */
static void tell(vnplug_backend *backend, const char *name, const char *json, int len)
{
    char whole[JSON];
    for (struct program *it = programs; it < programs + PROGRAMS; it++) {
        if (it->channel == 0 || !is_under(name, it->under))
            continue;
        int all = snprintf(whole, sizeof whole, "%.*s,\"lost\":%u}", len, json, it->lost);
        if (vnplug_backend_send(backend, it->channel, whole, (size_t)all) == VNPLUG_OK)
            it->lost = 0;
        else
            it->lost++;
    }
}

static void answered(vnplug_backend *backend, struct packet *packet, uint16_t flags, uint16_t count,
                     uint64_t ts_ns, struct question *asked)
{
    char json[JSON - 32];
    char name[NAME + 1], other[NAME + 1], client[INET6_ADDRSTRLEN], server[INET6_ADDRSTRLEN];
    char latency[24] = "null";
    struct bytes *at = &packet->dns;
    take_name(at, name);
    uint16_t type = take(at, 2);
    skip(at, 2);
    if (at->bad)
        return;
    inet_ntop(packet->family, packet->ends[1], client, sizeof client);
    inet_ntop(packet->family, packet->ends[0], server, sizeof server);
    if (asked != NULL && ts_ns >= asked->ts_ns)
        snprintf(latency, sizeof latency, "%ju", (uintmax_t)(ts_ns - asked->ts_ns) / 1000);
    int len = snprintf(json, sizeof json,
                       "{\"name\":\"%s\",\"type\":%u,\"client\":\"%s\",\"server\":\"%s\","
                       "\"rcode\":%u,\"latency_us\":%s,\"answers\":[",
                       name, type, client, server, flags & 0xfu, latency);
    for (int told = 0; count > 0 && told < ANSWERS; count--) {
        take_name(at, other);
        uint16_t of = take(at, 2);
        skip(at, 6);
        uint16_t size = take(at, 2);
        struct bytes data = *at;
        skip(at, size);
        if (at->bad)
            break;
        if ((of == 1 && size == 4) || (of == 28 && size == 16))
            inet_ntop(of == 1 ? AF_INET : AF_INET6, skip(&data, size), other, sizeof other);
        else if (of == 5)
            take_name(&data, other);
        else
            continue;
        if (data.bad)
            break;
        len += snprintf(json + len, sizeof json - (size_t)len, "%s\"%s\"", told++ ? "," : "", other);
    }
    len += snprintf(json + len, sizeof json - (size_t)len, "]");
    tell(backend, name, json, len);
}

static void see(vnplug_backend *backend, const struct vnplug_packet *frame)
{
    struct packet packet;
    if (!understand(frame, &packet))
        return;
    uint16_t id = take(&packet.dns, 2), flags = take(&packet.dns, 2);
    uint16_t count = take(&packet.dns, 2), answers = take(&packet.dns, 2);
    int answer = flags >> 15;
    skip(&packet.dns, 4);
    if (packet.dns.bad || count != 1 || packet.ports[!answer] != 53)
        return;
    struct question key = {.client_port = packet.ports[answer], .id = id};
    memcpy(key.client, packet.ends[answer], 16);
    memcpy(key.server, packet.ends[!answer], 16);
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < offsetof(struct question, ts_ns); i++)
        hash = (hash ^ ((const uint8_t *)&key)[i]) * 16777619u;
    struct question *asked = &questions[hash % PENDING];
    int same = asked->ts_ns != 0 && memcmp(asked, &key, offsetof(struct question, ts_ns)) == 0;
    if (!answer) {
        key.ts_ns = frame->ts_ns;
        /* Asked once more within 30 s: the time of the first question counts. */
        if (!same || frame->ts_ns - asked->ts_ns > 30000000000u)
            *asked = key;
    } else {
        answered(backend, &packet, flags, answers, frame->ts_ns, same ? asked : NULL);
        if (same)
            asked->ts_ns = 0;
    }
}

static void hear(vnplug_backend *backend, const struct vnplug_news *news)
{
    uint32_t wanted = news->kind == VNPLUG_NEWS_JOINED ? 0 : news->channel;
    struct program *it = programs;
    size_t len = news->len;
    while (it < programs + PROGRAMS && it->channel != wanted)
        it++;
    if (it == programs + PROGRAMS || len > NAME)
        vnplug_backend_hang_up(backend, news->channel, "too many programs, or too long a name");
    if (it == programs + PROGRAMS)
        return;
    if (news->kind == VNPLUG_NEWS_JOINED)
        *it = (struct program){.channel = news->channel};
    else if (news->kind == VNPLUG_NEWS_LEFT || len > NAME)
        it->channel = 0;
    else if (news->kind == VNPLUG_NEWS_MESSAGE) {
        while (len > 0 && strchr(".\n", news->bytes[len - 1]) != NULL)
            len--;
        it->under[len] = 0;
        while (len-- > 0)
            it->under[len] = (char)tolower(news->bytes[len]);
    }
}

int main(int argc, char **argv)
{
    struct vnplug_backend_options options;
    struct vnplug_options wire;
    struct vnplug_packet packet;
    struct vnplug_news news;
    vnplug_backend *backend;
    vnplug_port *port;
    char error[VNPLUG_ERRBUF];
    int got;

    if (argc != 4)
        errx(2, "usage: vnplug-dns ID NAME DEVICE");
    vnplug_options_init(&wire);
    wire.device = argv[3];
    wire.filter = "udp port 53";
    if (vnplug_open(&wire, error, sizeof error, &port) < 0)
        errx(1, "%s: %s", argv[3], error);
    vnplug_backend_options_init(&options);
    options.id = (uint32_t)strtoul(argv[1], NULL, 10);
    options.name = argv[2];
    if (vnplug_backend_register(&options, error, sizeof error, &backend) < 0)
        errx(1, "%s: %s", argv[2], error);
    vnplug_news_init(&news);
    for (;;) {
        while ((got = vnplug_backend_next(backend, 0, &news)) == 1)
            hear(backend, &news);
        if (got < 0)
            errx(1, "%s: %s", argv[2], vnplug_backend_last_error(backend));
        /* A batch at most, so that a busy wire does not keep programs waiting. */
        for (int i = 0; i < 256 && (got = vnplug_next(port, &packet)) == VNPLUG_PACKET; i++)
            see(backend, &packet);
        if (got < 0 || got == VNPLUG_ENDED)
            errx(1, "%s: %s", argv[3], got < 0 ? vnplug_last_error(port) : "the source ended");
        if (got == VNPLUG_NOTHING) {
            struct pollfd fds[] = {{.fd = vnplug_fd(port), .events = POLLIN},
                                   {.fd = vnplug_backend_fd(backend), .events = POLLIN}};
            poll(fds, 2, 100); /* a limit: without a daemon nothing wakes us, and `next` looks for it */
        }
    }
}
