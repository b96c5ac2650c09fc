/* A bundle of three ports, one of which is closed; tests/it/c.rs is the other half. */
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

static void say(const char *what)
{
    puts(what);
    fflush(stdout);
}

/* Reads all ports until each of them has had a packet, and holds that against the flags. */
static void read_all(vnplug_bundle *bundle, size_t expected, uint16_t flags)
{
    vnplug_port *const *ports, *port;
    struct vnplug_packet packets[4];
    int got[3] = {0};
    size_t count, taken, full = 0, i;

    for (int turns = 0; full < expected; turns++) {
        EXPECT(turns < 1000);
        EXPECT(vnplug_bundle_wait(bundle, 60000) >= 0);
        ports = vnplug_bundle_ports(bundle, &count);
        EXPECT(count == expected);
        while ((port = vnplug_bundle_next_ready(bundle)) != NULL) {
            for (i = 0; i < count && ports[i] != port; i++)
                ;
            EXPECT(i < count); /* none of those that were closed */
            int outcome = vnplug_next_batch(port, packets, 4, &taken);
            EXPECT(outcome == VNPLUG_NOTHING || outcome == VNPLUG_PACKET);
            if (outcome == VNPLUG_PACKET) {
                EXPECT(taken == 1 && packets[0].cap_len == 5 && packets[0].flags == flags);
                EXPECT(memcmp(packets[0].data, "hello", 5) == 0);
                full += !got[i];
                got[i] = 1;
            }
        }
    }
}

int main(void)
{
    struct vnplug_options options;
    vnplug_bundle *bundle;
    vnplug_port *port[3];
    char error[VNPLUG_ERRBUF];
    size_t count;

    EXPECT(vnplug_bundle_new(error, sizeof error, &bundle) == VNPLUG_OK);
    EXPECT(vnplug_bundle_wait(bundle, 0) == VNPLUG_TIMEOUT && vnplug_bundle_next_ready(bundle) == NULL);
    vnplug_options_init(&options);
    EXPECT(vnplug_bundle_open(bundle, &options, error, sizeof error, port) == VNPLUG_E_INVALID);
    EXPECT(port[0] == NULL && strstr(error, "device") != NULL);
    options.device = "host:nothing";
    EXPECT(vnplug_bundle_open(bundle, &options, error, sizeof error, port) == VNPLUG_E_NOT_FOUND);
    options.device = "host:eth0";
    for (int i = 0; i < 3; i++)
        EXPECT(vnplug_bundle_open(bundle, &options, error, sizeof error, &port[i]) == VNPLUG_OK);
    vnplug_port *const *ports = vnplug_bundle_ports(bundle, &count);
    EXPECT(count == 3 && memcmp(ports, port, sizeof port) == 0);
    EXPECT(strcmp(vnplug_device_name(port[2]), "host:eth0") == 0);
    say("open");
    read_all(bundle, 3, 0);

    vnplug_close(port[0]);
    /* The array stays, so that a loop over it may close what is over. */
    EXPECT(vnplug_bundle_ports(bundle, &count) == ports);
    EXPECT(count == 2 && ports[0] == port[2] && ports[1] == port[1]);
    vnplug_close(port[2]);
    ports = vnplug_bundle_ports(bundle, &count);
    EXPECT(count == 1 && ports[0] == port[1]);
    EXPECT(vnplug_bundle_open(bundle, &options, error, sizeof error, &port[0]) == VNPLUG_OK);
    say("closed two");
    read_all(bundle, 2, VNPLUG_FLAG_GAP);
    say("back");
    vnplug_bundle_close(bundle);
    say("over");
    getchar();
    return 0;
}
