/* A port whose packets go through an operator's program, beside one whose do not; e2e/tests/program_readers.rs is the other half. */
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

/* The program cuts packets behind the UDP header, and makes the last number of each IPv4 address 0. */
enum { PACKETS = 200, WHOLE = 100, HEADERS = 14 + 20 + 8, SOURCE = 14 + 12 + 3, TARGET = SOURCE + 4 };

static char error[VNPLUG_ERRBUF];

static vnplug_port *open_with(const char *twin)
{
    struct vnplug_options options;
    vnplug_port *port;

    vnplug_options_init(&options);
    options.device = "host:lab";
    options.twin = twin;
    EXPECT(vnplug_open(&options, error, sizeof error, &port) == VNPLUG_OK);
    return port;
}

/* Reads so many packets: how many are as the program leaves them. The others are as they were sent. */
static int changed(vnplug_port *port)
{
    struct vnplug_packet packet;
    int count = 0, outcome, addresses = 0;

    for (int i = 0; i < PACKETS;) {
        outcome = vnplug_next(port, &packet);
        if (outcome == VNPLUG_NOTHING) {
            EXPECT(vnplug_wait(port, 60000) == VNPLUG_READY);
            continue;
        }
        EXPECT(outcome == VNPLUG_PACKET);
        i++;
        if (packet.cap_len == HEADERS) {
            EXPECT(packet.data[12] == 8 && packet.data[13] == 0);
            EXPECT(packet.data[SOURCE] == 0 && packet.data[TARGET] == 0);
            count++;
        } else {
            EXPECT(packet.cap_len == WHOLE);
            addresses |= packet.data[SOURCE] | packet.data[TARGET];
        }
    }
    /* The control: there was something to hide. */
    EXPECT(count == PACKETS || addresses != 0);
    return count;
}

int main(void)
{
    struct vnplug_options options;
    vnplug_port *port, *through, *plain;
    uint64_t dropped = 0;

    vnplug_options_init(&options);
    options.device = "host:lab";
    options.twin = "nothing";
    EXPECT(vnplug_open(&options, error, sizeof error, &port) == VNPLUG_E_NOT_FOUND && port == NULL);
    EXPECT(strstr(error, "nothing") != NULL);

    through = open_with("headers");
    plain = open_with(NULL);
    EXPECT(changed(through) == PACKETS);
    EXPECT(changed(plain) == 0);
    /* What it dropped: packets that are not IPv4. */
    EXPECT(vnplug_host_counter(through, "program", &dropped) == VNPLUG_OK && dropped >= PACKETS / 2);
    EXPECT(vnplug_host_counter(plain, "program", &dropped) == VNPLUG_OK && dropped == 0);
    vnplug_close(through);
    vnplug_close(plain);
    puts("done");
    return 0;
}
