/* Ports of a switch, which learns who is where; e2e/tests/switch_ports.rs is the other half. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vnplug.h>

#define EXPECT(x) \
    do { \
        if (!(x)) { \
            fprintf(stderr, "line %d: %s\n", __LINE__, #x); \
            exit(1); \
        } \
    } while (0)

enum { ONE = 1, TWO = 2, THREE = 3, ALL = 0xff, OFTEN = 2000 };

static struct vnplug_options options;
static char error[VNPLUG_ERRBUF];

static void say(const char *what)
{
    puts(what);
    fflush(stdout);
}

static vnplug_port *join(uint32_t how)
{
    vnplug_port *port;

    options.joins = how;
    if (vnplug_open(&options, error, sizeof error, &port) != VNPLUG_OK) {
        fprintf(stderr, "%s\n", error);
        exit(1);
    }
    return port;
}

/* Sends a numbered frame from one station to another. */
static void give(vnplug_port *port, uint8_t from, uint8_t to, uint8_t number)
{
    uint8_t frame[60] = {2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5, number};

    if (to == ALL)
        memset(frame, 0xff, 6);
    EXPECT(vnplug_send(port, frame, sizeof frame) == 1);
}

/* The next frame is this one. */
static void take(vnplug_port *port, uint8_t from, uint8_t number)
{
    struct vnplug_packet packet;
    int outcome;

    while ((outcome = vnplug_next(port, &packet)) == VNPLUG_NOTHING)
        EXPECT(vnplug_wait(port, 60000) >= 0);
    EXPECT(outcome == VNPLUG_PACKET && packet.cap_len == 60);
    if (packet.data[11] != from || packet.data[14] != number) {
        fprintf(stderr, "frame %d of station %d, not %d of %d\n", packet.data[14], packet.data[11], number, from);
        exit(1);
    }
}

static void fails(uint32_t joins, uint32_t reserved, const char *what)
{
    vnplug_port *port;

    options.joins = joins;
    options.reserved = reserved;
    EXPECT(vnplug_open(&options, error, sizeof error, &port) == VNPLUG_E_INVALID);
    EXPECT(port == NULL && strstr(error, what) != NULL);
    options.reserved = 0;
}

int main(void)
{
    vnplug_port *one, *two, *three;

    vnplug_options_init(&options);
    options.device = "host:lan0";
    fails(VNPLUG_JOINS_DIRECT + 1, 0, "joins");
    fails(VNPLUG_JOINS_SWITCH, 1, "reserved");

    one = join(VNPLUG_JOINS_SWITCH);
    two = join(VNPLUG_JOINS_SWITCH);
    three = join(VNPLUG_JOINS_SWITCH);
    /* Nobody knows where TWO is: all are given the frame. */
    give(one, ONE, TWO, 1);
    take(two, ONE, 1);
    take(three, ONE, 1);
    give(two, TWO, ALL, 2);
    take(one, TWO, 2);
    take(three, TWO, 2);
    /* Now it is known: the third has the next one for all, and not this. */
    give(one, ONE, TWO, 3);
    take(two, ONE, 3);
    give(two, TWO, ONE, 4);
    take(one, TWO, 4);
    give(one, ONE, ALL, 5);
    take(two, ONE, 5);
    take(three, ONE, 5);
    say("learned");
    getchar();
    vnplug_close(one);
    vnplug_close(two);
    vnplug_close(three);

    one = join(VNPLUG_JOINS_DIRECT);
    two = join(VNPLUG_JOINS_DIRECT);
    give(two, TWO, ALL, 6);
    take(one, TWO, 6);
    for (int i = 0; i < OFTEN; i++) {
        give(one, ONE, TWO, (uint8_t)i);
        take(two, ONE, (uint8_t)i);
    }
    say("direct");
    getchar();
    vnplug_close(one);
    vnplug_close(two);
    return 0;
}
