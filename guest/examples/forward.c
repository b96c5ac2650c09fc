/*
 * Carries frames between two sources, both ways, from where they were received: a bridge of two ports.
 *
 *     cc forward.c -lvnplug -o forward && ./forward eth1 eth2
 */
#include <stdio.h>
#include <vnplug.h>

enum { AT_ONCE = 256 }; /* frames until the other way has its turn */

static int failed(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    return -1;
}

/* Sends on what `from` has, by `to`. What finds no room is dropped, as by any bridge. 0, or -1 on an error. */
static int carry(vnplug_port *from, vnplug_port *to)
{
    struct vnplug_packet packet;
    int lent, got = VNPLUG_NOTHING;

    /* Again after a restart of the daemon, and for nothing meanwhile. */
    lent = vnplug_lend(from, to);
    if (lent == VNPLUG_E_DISCONNECTED)
        return 0; /* one of them is away, and comes back while it is waited for */
    if (lent < 0)
        return failed(vnplug_device_name(from), vnplug_last_error(from));
    for (int i = 0; i < AT_ONCE && (got = vnplug_next(from, &packet)) == VNPLUG_PACKET; i++) {
        int sent = vnplug_forward(to, NULL, 0, packet.data, packet.cap_len);
        if (sent < 0 && sent != VNPLUG_E_DISCONNECTED)
            return failed(vnplug_device_name(to), vnplug_last_error(to));
    }
    if (got != VNPLUG_PACKET && got != VNPLUG_NOTHING)
        return failed(vnplug_device_name(from), got == VNPLUG_ENDED ? "it ended" : vnplug_last_error(from));
    /* The room of what was posted comes back when `to` has sent it. */
    vnplug_flush(to);
    return 0;
}

int main(int argc, char **argv)
{
    char error[VNPLUG_ERRBUF];
    vnplug_bundle *bundle;
    vnplug_port *ports[2];

    if (argc != 3) {
        fprintf(stderr, "forward SOURCE SOURCE\n");
        return 2;
    }
    if (vnplug_bundle_new(error, sizeof error, &bundle) < 0)
        return failed("bundle", error) < 0;
    for (int i = 0; i < 2; i++) {
        struct vnplug_options options;

        vnplug_options_init(&options);
        options.device = argv[1 + i];
        options.direction = VNPLUG_RX; /* what the source itself sends is not received again */
        options.transmit_bytes = 1 << 20;
        options.posts = 1;
        if (vnplug_bundle_open(bundle, &options, error, sizeof error, &ports[i]) < 0)
            return failed(argv[1 + i], error) < 0;
    }
    while (vnplug_bundle_wait(bundle, -1) >= 0)
        if (carry(ports[0], ports[1]) < 0 || carry(ports[1], ports[0]) < 0)
            break;
    vnplug_bundle_close(bundle);
    return 1;
}
