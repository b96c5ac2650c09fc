/*
 * vnplug.h: read a host's packets from rings in shared memory, on the host and in its guests.
 *
 * Link with -lvnplug (shared), or with libvnplug.a -lpthread -ldl -lm (static).
 *
 * A PORT is one attached reader of one device. The smallest program:
 *
 *     struct vnplug_options options;
 *     struct vnplug_packet packet;
 *     vnplug_port *port;
 *     char error[VNPLUG_ERRBUF];
 *
 *     vnplug_options_init(&options);
 *     options.device = "host:eth1";
 *     options.filter = "udp port 53";
 *     if (vnplug_open(&options, error, sizeof error, &port) < 0)
 *         errx(1, "%s", error);
 *     for (;;) {
 *         int got = vnplug_next(port, &packet);
 *         if (got == VNPLUG_PACKET)
 *             handle(packet.data, packet.cap_len);
 *         else if (got == VNPLUG_NOTHING)
 *             vnplug_wait(port, -1);
 *         else
 *             break;                      // VNPLUG_ENDED, or an error: vnplug_last_error(port)
 *     }
 *     vnplug_close(port);
 *
 * RESULTS. Functions return an int: 0 or more is an outcome, less than 0 an error. Outcomes that
 * differ in meaning differ in value: a packet (1), nothing yet (0), ended (2).
 *
 * THREADS. A port serves one thread at a time; it may move between threads. Meanwhile any other thread
 * may call, for the same port and at any time before vnplug_close: vnplug_stats, vnplug_host_counter,
 * vnplug_fd, vnplug_device_name, vnplug_last_error. They do not wait for the port's thread, nor it for
 * them, but for the time of one request to the host. Different ports are independent: send by one of
 * its own what another thread than the reader sends. The library starts no thread, installs no signal handler and never calls exit or
 * abort. After fork(2) only one of the two processes may use a port.
 *
 * LIFETIMES. `data` of a packet points into the ring. It is valid until the next call of
 * vnplug_next, vnplug_poll_next, vnplug_next_batch, vnplug_release, vnplug_wait or vnplug_close on
 * the same port. Do not write there: on the host the memory is mapped for reading only, and a store
 * raises SIGSEGV; in a guest it would change what the guest's other readers of a group see. Strings the
 * library returns are valid as said at each function. Strings you pass are copied.
 *
 * LIMITS. An open port has four descriptors, a port that sends five; the ports of a bundle share three. On
 * the host a port takes two mappings for each receive queue (three where its ring has 2 MiB or more), one for a
 * transmit ring and one beside: Linux's vm.max_map_count of 65,530 suffices for some 21,000 ports of one
 * queue with small rings.
 *
 * RESTARTS. When the daemon (or a guest's agent) restarts, the port reopens by itself, under the
 * same descriptor and with the same filter; the first packet afterwards has VNPLUG_FLAG_GAP. What
 * was published before is read first. Set `no_reconnect` to get VNPLUG_E_DISCONNECTED instead.
 *
 * UNPLUGGING. In a QEMU guest the rings lie in a PCI device. If the device is removed while a port
 * is open, and the host did not close the port first, touching the ring raises SIGBUS.
 */
#ifndef VNPLUG_H
#define VNPLUG_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An attached reader. */
typedef struct vnplug_port vnplug_port;

/* Many ports of one reader. */
typedef struct vnplug_bundle vnplug_bundle;

/* A process that programs in guests and elsewhere use, and a program's end of a channel to one; see BACK-ENDS. */
typedef struct vnplug_backend vnplug_backend;
typedef struct vnplug_channel vnplug_channel;

/* Outcomes. */
enum {
    VNPLUG_OK = 0,
    VNPLUG_NOTHING = 0,     /* next: nothing yet */
    VNPLUG_PACKET = 1,      /* next: there is a packet */
    VNPLUG_ENDED = 2,       /* next: the source ended, and everything was read */
    VNPLUG_TIMEOUT = 0,     /* wait: the time is over */
    VNPLUG_READY = 1,       /* wait: call next, it has something to say */
    VNPLUG_INTERRUPTED = 3  /* wait: a signal was delivered */
};

/* Errors. */
enum {
    VNPLUG_E_INVALID = -1,      /* an argument is NULL or out of range */
    VNPLUG_E_UNREACHABLE = -2,  /* nobody listens: start vnplugd (host) or the agent (guest) */
    VNPLUG_E_PERMISSION = -3,   /* this user may not connect */
    VNPLUG_E_DISCONNECTED = -4, /* the daemon or agent closed the connection */
    VNPLUG_E_TIMED_OUT = -5,    /* no answer */
    VNPLUG_E_PROTOCOL = -6,     /* the other side does not speak the protocol */
    VNPLUG_E_VERSION = -7,      /* library and daemon do not match: update one */
    VNPLUG_E_REFUSED = -10,     /* the daemon refuses, for a reason not below */
    VNPLUG_E_NOT_FOUND = -11,   /* no such device */
    VNPLUG_E_DENIED = -12,      /* the operator's policy forbids it */
    VNPLUG_E_FILTER = -13,      /* the filter does not compile; the text says where */
    VNPLUG_E_NO_MEMORY = -14,   /* no memory for the ring at this moment */
    VNPLUG_E_LIMIT = -15,       /* a limit of the operator is reached */
    VNPLUG_E_UNAVAILABLE = -16, /* the agent cannot reach the host at this moment; nobody is the back-end */
    VNPLUG_E_FULL = -17,        /* the other side has not taken what was said before */
    VNPLUG_E_GONE = -20,        /* the host closed the port, or an operator revoked the channel */
    VNPLUG_E_QUARANTINED = -21, /* this reader's side of the ring was overwritten */
    VNPLUG_E_CORRUPT = -22,     /* the ring was overwritten, or has an unknown layout */
    VNPLUG_E_SYSTEM = -23,      /* a system call failed */
    VNPLUG_E_INTERNAL = -24,    /* a defect of the library; do not use the port any more */
    VNPLUG_E_SOURCE = -25       /* the source failed (a damaged file); what came before was read */
};

/* Bytes that hold any usual error text; longer ones are cut. */
#define VNPLUG_ERRBUF 256

/* Bits of vnplug_packet.flags. */
enum {
    VNPLUG_FLAG_OUTBOUND = 1 << 0,      /* sent by the host's interface, else received */
    VNPLUG_FLAG_VLAN = 1 << 1,          /* vlan_tci is valid */
    VNPLUG_FLAG_HW_TIMESTAMP = 1 << 2,  /* the NIC took the timestamp */
    VNPLUG_FLAG_GAP = 1 << 3,           /* an unknown number may be missing before this packet */
    VNPLUG_FLAG_SOURCE_LOSS = 1 << 4,   /* some were lost in the kernel or NIC before this one */
    VNPLUG_FLAG_CSUM_NOT_READY = 1 << 5, /* the checksum was left to the NIC, it is not valid */
    VNPLUG_FLAG_OFFLOAD = 1 << 6 /* still to be cut or summed: see VNPLUG_SEGMENTS_MERGED */
};

/* One packet. */
struct vnplug_packet {
    const uint8_t *data; /* Ethernet header included, FCS excluded; see LIFETIMES */
    uint64_t ts_ns;      /* nanoseconds since 1970-01-01 UTC */
    uint32_t cap_len;    /* bytes at `data` */
    uint32_t wire_len;   /* bytes on the wire, FCS excluded */
    uint32_t flow_hash;  /* the same for both directions of a flow */
    uint32_t lost;       /* packets this port lost just before this one */
    uint16_t flags;      /* VNPLUG_FLAG_* */
    uint16_t vlan_tci;   /* outermost 802.1Q tag; the bytes hold it too */
    uint16_t source;     /* the daemon's number of the device */
    uint16_t queue;      /* receive queue of the device */
};

/* One instruction of a classic BPF program; the same as struct bpf_insn and sock_filter. */
struct vnplug_insn {
    uint16_t code;
    uint8_t jt, jf;
    uint32_t k;
};

enum { VNPLUG_BOTH = 0, VNPLUG_RX = 1, VNPLUG_TX = 2 };
/*
 * How to wait. SLEEP: until the host rings; the least CPU, and the only one with which vnplug_next
 * arms the wake-up and vnplug_fd may be waited for. BALANCED: look for a while, sleep by itself for a
 * while, then until the host rings. SPIN: never sleep; lowest latency, one whole CPU.
 */
enum { VNPLUG_WAIT_SLEEP = 0, VNPLUG_WAIT_BALANCED = 1, VNPLUG_WAIT_SPIN = 2 };
enum { VNPLUG_BALANCE_FLOW = 0, VNPLUG_BALANCE_ROUND_ROBIN = 1 };

/*
 * How super-frames come, and frames whose checksum was left to a NIC: as the wire would have carried
 * them; or as they are, with VNPLUG_FLAG_OFFLOAD. Then the 12 bytes before `data` are a virtio-net
 * header (virtio 1.2, 5.1.6; little-endian): write(tap, data - 12, cap_len + 12) passes both on to a TAP
 * with IFF_VNET_HDR and TUNSETVNETHDRSZ 12. What a port sends may be so, too (ring-format.md).
 */
enum { VNPLUG_SEGMENTS_WIRE = 0, VNPLUG_SEGMENTS_MERGED = 1 };

/*
 * What a port of a switch is. NOT: it sees all frames that enter the switch. SWITCH: it takes part, is given the
 * frames that are due to it, and what it sends comes from a port of the switch; its ring for sending has 1 MiB if
 * `transmit_bytes` is 0. DIRECT: as SWITCH, and ports of one user that all say so hand frames to each other, without the
 * switch (docs/switch.md, Direct mode); not in a guest, nor in a bundle.
 */
enum { VNPLUG_JOINS_NOT = 0, VNPLUG_JOINS_SWITCH = 1, VNPLUG_JOINS_DIRECT = 2 };

/* What to open. Initialise with vnplug_options_init; zero is every field's default. */
struct vnplug_options {
    size_t size;                       /* set by vnplug_options_init; fields are only appended */
    const char *device;                /* required, as vnplug_list names it; NAME@Q = one queue */
    const char *filter;                /* pcap-filter(7); NULL = all */
    const struct vnplug_insn *program; /* instead of `filter` */
    size_t program_len;                /* instructions at `program` */
    uint64_t ring_bytes;               /* per receive queue; 0 = the daemon's default */
    uint64_t max_delay_us;             /* longest wait for the watermark; 0 = 10 ms */
    uint32_t watermark;                /* sleep until this many are unread, or half the
                                          ring is; 0 = 1 */
    uint32_t snaplen;                  /* bytes per packet; 0 = whole packets */
    uint32_t direction;                /* VNPLUG_BOTH, _RX, _TX */
    uint32_t sample;                   /* one in this many; 0 = all */
    const char *cluster;               /* share the device with this cluster; NULL = do not */
    uint32_t balance;                  /* how the cluster shares: VNPLUG_BALANCE_* */
    uint32_t no_reconnect;             /* not 0: do not survive a restart of the daemon */
    const char *label;                 /* what the operator sees; NULL = program[pid] */
    const char *socket;                /* NULL = $VNPLUG_SOCKET or /run/vnplug/vnplug.sock */
    uint32_t paused;                   /* not 0: gets nothing before vnplug_tune says so */
    uint32_t waiting;                  /* what vnplug_wait does: VNPLUG_WAIT_* */
    uint64_t transmit_bytes;           /* a ring for sending; 0 = the port does not send */
    uint32_t spin_us;                  /* VNPLUG_WAIT_BALANCED: how long it looks; 0 = 50 */
    uint32_t longest_sleep_us;         /* and sleep up to so long by itself; 0 = 50 */
    const char *group;                 /* read one copy of each packet with the others of this
                                          group, who then see whatever you see; NULL = a ring of
                                          your own. Packets overwritten before they were read
                                          count as lost in vnplug_stats, not in the host's
                                          counters */
    uint64_t arena_bytes;              /* of a group's first member, per receive queue: room for
                                          its packets; 0 = the daemon's default */
    uint32_t segments;                 /* how super-frames come: VNPLUG_SEGMENTS_* */
    uint32_t posts;                    /* 1: vnplug_forward may leave what it received where it lies;
                                          not in a group */
    const char *twin;                  /* each packet goes through the operator's eBPF program of this
                                          name, which may drop it or change it; NULL = none */
    uint32_t joins;                    /* whether it takes part in a switch: VNPLUG_JOINS_* */
    uint32_t reserved;                 /* 0 */
};

/* What can be turned while a port is open. */
struct vnplug_tuning {
    uint32_t direction; /* VNPLUG_BOTH, _RX, _TX */
    uint32_t sample;    /* one in this many; 0 = all */
    uint32_t paused;    /* not 0: the port gets nothing; the host counts that as "paused" */
};

/* What a rule does with a packet; whatever it does, it counts it. */
enum {
    VNPLUG_ACCEPT = 0, /* the port gets it; no further rule is tried */
    VNPLUG_DROP = 1,   /* the port does not get it; no further rule is tried */
    VNPLUG_COUNT = 2   /* the next rules, and at last the default, decide */
};

/* Kinds of rules. */
enum { VNPLUG_FLOW_RULES = 0, VNPLUG_WILDCARD_RULES = 1 };

/* One flow, both directions; it does not matter which end is a. Ports in host byte order. */
struct vnplug_flow {
    uint16_t vlan_id; /* the outermost VLAN; 0 = untagged */
    uint8_t proto;    /* IP protocol, behind IPv6's extension headers */
    uint8_t version;  /* 4 or 6 */
    uint8_t host_a[16], host_b[16]; /* as in the packet; IPv4 in the first four bytes */
    uint16_t port_a, port_b;        /* 0 where there are none */
};

enum { VNPLUG_NO_VLAN = 4096 };

/*
 * Packets that have everything that is not 0. Zeros are every packet. Ports in host byte order, the
 * lowest and the highest.
 */
struct vnplug_pattern {
    uint16_t vlan_id;      /* VNPLUG_NO_VLAN = untagged */
    uint16_t ethertype;    /* after VLAN tags */
    uint8_t proto;         /* IP protocol, behind IPv6's extension headers */
    uint8_t bidirectional; /* not 0: also with source and target swapped */
    uint8_t source_mac[6], target_mac[6];
    uint8_t version;       /* of the four addresses: 4 or 6; 0 = they do not count */
    uint8_t tos, tos_mask; /* type of service or traffic class, in the bits of the mask */
    uint8_t tcp_flags, tcp_flags_mask;
    uint8_t unused;        /* 0 */
    uint8_t source[16], source_mask[16]; /* IPv4 in the first four bytes */
    uint8_t target[16], target_mask[16];
    uint16_t source_ports[2], target_ports[2];
};

/* Counters of one rule, since it was added or the port reopened. */
struct vnplug_rule_stats {
    uint64_t matched; /* packets that it was about */
    uint64_t idle_ms; /* since the last of them, or since it was added */
};

/* This reader's own counters since vnplug_open. */
struct vnplug_stats {
    size_t size;       /* set to sizeof(struct vnplug_stats); fields are only appended */
    uint64_t received; /* packets taken */
    uint64_t bytes;    /* their captured bytes */
    uint64_t lost;     /* packets this port lost, as the packets after them told */
    uint64_t gaps;     /* packets with VNPLUG_FLAG_GAP */
    uint64_t reopened; /* restarts survived */
};

/* One device. Text comes from the host: escape it before printing. */
struct vnplug_device {
    const char *name;        /* to open it by */
    const char *kind;        /* af_packet, pcap, gen, ... */
    const char *state;       /* up, down, gone, ended, waiting */
    const char *description; /* for people */
    uint32_t queues;         /* receive queues */
    uint32_t ports;          /* attached ports; 0 in guests */
    uint32_t link_type;      /* a DLT number of tcpdump.org; 1 = Ethernet */
    uint32_t mtu;            /* of the host's interface; 0 = unknown */
    uint32_t speed_mbps;     /* megabits per second; 0 = unknown */
    uint8_t mac[6];          /* the interface's; zeros = none */
    const char *const *addresses; /* "192.0.2.1/24", "fe80::1/64", then NULL; none in guests */
};

static inline void vnplug_options_init(struct vnplug_options *options)
{
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
}

/* The library's version, "major.minor.patch"; static. */
const char *vnplug_version(void);

/*
 * Opens a port and stores it in *port. On an error *port is NULL and errbuf (which may be NULL, or
 * errlen 0) gets the reason.
 */
int vnplug_open(const struct vnplug_options *options, char *errbuf, size_t errlen,
                vnplug_port **port);

/*
 * Opens `count` ports, one for each thread of a reader, that share the device by flow: each flow goes
 * to one of them. `options` must not name a cluster. On an error none is open, and `ports` is as it
 * was.
 */
int vnplug_open_spread(const struct vnplug_options *options, size_t count, char *errbuf,
                       size_t errlen, vnplug_port **ports);

/* Closes a port; NULL is allowed. Its descriptor and packets are invalid afterwards. */
void vnplug_close(vnplug_port *port);

/*
 * The next packet: VNPLUG_PACKET, VNPLUG_NOTHING, VNPLUG_ENDED, or an error, which is final.
 *
 * VNPLUG_NOTHING has armed the wake-up: from then on vnplug_fd is readable at the next packet. A
 * call that returns a packet that was published already makes no system call.
 */
int vnplug_next(vnplug_port *port, struct vnplug_packet *packet);

/*
 * The same for a reader that spins: does not arm the wake-up, and makes no system call but one in
 * 65,536 empty calls. Before waiting call vnplug_next.
 */
int vnplug_poll_next(vnplug_port *port, struct vnplug_packet *packet);

/*
 * Up to `max` packets at once, all valid until the next call (see LIFETIMES). Returns VNPLUG_PACKET
 * with *count > 0, else as vnplug_next with *count = 0.
 */
int vnplug_next_batch(vnplug_port *port, struct vnplug_packet *packets, size_t max, size_t *count);

/*
 * For a member of a group: the next packet where it lies in the arena, without a copy; outcomes as of
 * vnplug_next. The other fields of *packet are true; the bytes at `data` may be overwritten at any
 * moment. Read what you need, then call vnplug_is_whole before you believe it. (vnplug_next hands a
 * group's members private copies, which are whole.) On a port of its own the packet is always whole.
 */
int vnplug_look(vnplug_port *port, struct vnplug_packet *packet);

/*
 * 1 if everything read so far of the packet that vnplug_look returned last was that packet; 0 if it was
 * overwritten, which counts it as lost. Call it once for each vnplug_look, before the next one.
 */
int vnplug_is_whole(vnplug_port *port);

/* Gives the room of all packets taken back to the host. The calls above do it now and then. */
void vnplug_release(vnplug_port *port);

/*
 * Waits, as the port was told to, until there is something to read (or the watermark is reached), at most timeout_ms (-1: no
 * limit): VNPLUG_READY, VNPLUG_TIMEOUT, VNPLUG_INTERRUPTED, or an error.
 */
int vnplug_wait(vnplug_port *port, int timeout_ms);

/*
 * Sends a frame, Ethernet header included, FCS excluded: 1 = written, 0 = no room now, or an error.
 * `frame` is copied; it may be a packet that this port has lent, and those stay valid. The port needs
 * `transmit_bytes`, and its user a grant to send. VNPLUG_E_DISCONNECTED while the daemon is gone:
 * vnplug_next and vnplug_wait bring it back, when what was received before is read. What became of frames
 * tell the host's counters "sent" and "send_dropped_full", "_length", "_link", "_unsupported".
 */
int vnplug_send(vnplug_port *port, const uint8_t *frame, size_t len);

/* The same in two steps: push a batch, then flush. What is not flushed is not sent. */
int vnplug_push(vnplug_port *port, const uint8_t *frame, size_t len);
int vnplug_flush(vnplug_port *port);

/*
 * Sends on what was received: as vnplug_push, of a frame that is `head` and then `rest`: 1, 0 or an error. `head` is
 * copied; it is what the program changed, as the Ethernet header, or nothing (NULL, 0). If the port was opened with
 * `posts`, and all of `rest` is a part of a packet that this port has lent, it is not copied: the host is told where
 * it lies, and has its room back when it was sent, whatever the program releases before. Any other `rest` is
 * copied. Call it before the next call that ends the packet's loan; frames that lie there leave at the latest with that one.
 *
 *     while (vnplug_next(port, &packet) == VNPLUG_PACKET) {
 *         make_header(header, packet.data);
 *         if (vnplug_forward(port, header, 14, packet.data + 14, packet.cap_len - 14) == 0)
 *             dropped++;
 *     }
 *
 * While frames that lie there wait, vnplug_fd is readable after a millisecond though no packet may be there: vnplug_next gives
 * back the room of those that were sent.
 *
 * With `posts`, a port with `transmit_bytes` is not opened by a daemon or an agent that does not know it
 * (VNPLUG_E_PROTOCOL), and no port in a group (VNPLUG_E_REFUSED).
 */
int vnplug_forward(vnplug_port *port, const uint8_t *head, size_t head_len, const uint8_t *rest, size_t rest_len);

/*
 * What `from` receives may be sent on by `to` from where it lies, too: vnplug_forward of `to` takes packets that `from` has lent.
 * Both are ports of one bundle, opened with `posts`. 0, or VNPLUG_E_INVALID if they are not; VNPLUG_E_DISCONNECTED while one of them
 * is away. It lasts until one of them is reopened or closed (vnplug_stats: "reopened"); then packets are copied until this is
 * called again, which costs nothing as long as it lasts. Flush `to` before `from` waits: the room of what was posted comes back
 * when `to` has sent it. What waits in `to` when `from` is closed is dropped ("send_dropped_place"). Neither port is in use by
 * another thread.
 */
int vnplug_lend(vnplug_port *from, vnplug_port *to);

/*
 * Waits until a frame of `len` bytes has room, at most timeout_ms: 1 = it has, 0 = the time is over,
 * or an error. Packets lent before are invalid afterwards: their room goes back to the host, that of those that
 * vnplug_forward named as they are sent. Of a port that is lent to this one, call vnplug_release before.
 */
int vnplug_wait_for_room(vnplug_port *port, size_t len, int timeout_ms);

/*
 * A descriptor for poll, select and epoll, the same for the port's life. Readable: call vnplug_next
 * until VNPLUG_NOTHING. Level-triggered; also good edge-triggered. Do not read or close it, and call
 * vnplug_next until VNPLUG_NOTHING once before waiting on it.
 */
int vnplug_fd(const vnplug_port *port);

/* Replaces the filter between two packets; NULL or "" = all. On an error the old one stays. */
int vnplug_set_filter(vnplug_port *port, const char *filter);

/* The same with a program. */
int vnplug_set_program(vnplug_port *port, const struct vnplug_insn *program, size_t len);

/* Turns direction, sampling, or the port off or on, between two packets. All fields count. */
int vnplug_tune(vnplug_port *port, const struct vnplug_tuning *tuning);

/*
 * RULES are run on the host after the filter: first the one about the packet's flow, found by a
 * hash; then wildcard rules by ascending id; what none of them decides the default does, which is to
 * accept. A rule with the key of an old one replaces it. They survive a restart of the daemon; their
 * counters do not. Limits: 65,536 flows, 4,096 wildcard rules.
 */
int vnplug_add_flow_rules(vnplug_port *port, const struct vnplug_flow *flows, size_t count,
                          uint32_t action);
int vnplug_add_wildcard_rule(vnplug_port *port, uint16_t id, const struct vnplug_pattern *pattern,
                             uint32_t action);

/* What becomes of packets that no rule decides: not 0 = the port gets them. */
int vnplug_set_rule_default(vnplug_port *port, int accept);

/* VNPLUG_E_NOT_FOUND: there is no such rule. */
int vnplug_remove_flow_rule(vnplug_port *port, const struct vnplug_flow *flow);
int vnplug_remove_wildcard_rule(vnplug_port *port, uint16_t id);
int vnplug_flow_rule_stats(vnplug_port *port, const struct vnplug_flow *flow,
                           struct vnplug_rule_stats *stats);
int vnplug_wildcard_rule_stats(vnplug_port *port, uint16_t id, struct vnplug_rule_stats *stats);

/* Removes the rules of a kind (VNPLUG_*_RULES) that no packet matched for this time; counts them in
 * *removed, which may be NULL. */
int vnplug_purge_rules(vnplug_port *port, uint32_t kind, uint64_t idle_ms, size_t *removed);

/* This reader's counters. No request is made. Set stats->size first. */
int vnplug_stats(const vnplug_port *port, struct vnplug_stats *stats);

/*
 * A counter of the host for this port, by its name in `vnplug stats`. Asks the host at each call.
 * VNPLUG_E_NOT_FOUND: no such counter. VNPLUG_E_UNAVAILABLE: the host cannot be reached.
 */
int vnplug_host_counter(vnplug_port *port, const char *name, uint64_t *value);

/* Why the last call that failed on this port did; the text changes with the next one that fails, by
 * whatever thread. Never NULL. */
const char *vnplug_last_error(const vnplug_port *port);

/* The device's name, as the host calls it; valid until vnplug_close. */
const char *vnplug_device_name(const vnplug_port *port);

/* Link type: a DLT number of tcpdump.org; 1 = Ethernet. */
uint32_t vnplug_link_type(const vnplug_port *port);

/* Longest captured length in bytes. */
uint32_t vnplug_snaplen(const vnplug_port *port);

/*
 * BUNDLES are for a reader of many ports, thousands for example, each with its own filter. They share
 * one connection and one wake-up, so that they take few descriptors here and in the daemon, and are
 * waited for together:
 *
 *     vnplug_bundle_new(error, sizeof error, &bundle);
 *     for (each target)
 *         vnplug_bundle_open(bundle, &options, error, sizeof error, &port);
 *     while (vnplug_bundle_ports(bundle, &count), count > 0) {
 *         if (vnplug_bundle_wait(bundle, -1) < 0)
 *             break;
 *         while ((port = vnplug_bundle_next_ready(bundle)) != NULL) {
 *             while ((outcome = vnplug_next_batch(port, packets, 64, &got)) == VNPLUG_PACKET)
 *                 handle(packets, got);
 *             if (outcome != VNPLUG_NOTHING)  // VNPLUG_ENDED, or an error
 *                 vnplug_close(port);         // else every wait returns at once
 *         }
 *     }
 *     vnplug_bundle_close(bundle);
 *
 * A bundle and all its ports serve one thread at a time. Its ports do what others do, but that
 * vnplug_next never arms a wake-up: wait with vnplug_bundle_wait, not for vnplug_fd.
 *
 * Makes a bundle without ports. On an error *bundle is NULL and errbuf gets the reason.
 */
int vnplug_bundle_new(char *errbuf, size_t errlen, vnplug_bundle **bundle);

/* Opens one more port; as vnplug_open. All ports of a bundle are of one daemon or agent. */
int vnplug_bundle_open(vnplug_bundle *bundle, const struct vnplug_options *options, char *errbuf,
                       size_t errlen, vnplug_port **port);

/*
 * As vnplug_wait, until any port has what it would wait for. A port that ended or failed makes it
 * return at once: vnplug_close it. Packets lent before are invalid afterwards. Ports that come back
 * after a restart of the daemon are reopened here, which takes 10 ms of each call, or so long as one
 * of them takes.
 */
int vnplug_bundle_wait(vnplug_bundle *bundle, int timeout_ms);

/*
 * One of the ports that may have something to say, each once after a wait: it has packets, be it fewer
 * than its watermark, or it is not attached, or over. NULL: the others have nothing. What this and
 * vnplug_bundle_wait cost depends on how many those are, and not on how many ports there are.
 */
vnplug_port *vnplug_bundle_next_ready(vnplug_bundle *bundle);

/*
 * The open ports of a bundle, *count of them (which may be NULL), in the order of their opening until
 * one is closed: then the last one takes its place. Valid until a port is opened.
 */
vnplug_port *const *vnplug_bundle_ports(const vnplug_bundle *bundle, size_t *count);

/* Closes a bundle and all its ports; NULL is allowed. (vnplug_close closes one of them.) */
void vnplug_bundle_close(vnplug_bundle *bundle);

/*
 * The devices that may be opened: *devices is an array of *count, to be freed with
 * vnplug_list_free. socket: NULL = the default.
 */
int vnplug_list(const char *socket, char *errbuf, size_t errlen, struct vnplug_device **devices,
                size_t *count);

/* Frees what vnplug_list returned; NULL is allowed. */
void vnplug_list_free(struct vnplug_device *devices, size_t count);

/*
 * BACK-ENDS. A back-end is a process on the host that an operator has granted a number and a name. Programs on
 * the host, in containers and in guests open channels to it. Both ends are loops around `next`, which says
 * what happened. docs/backends.md has a tutorial. A back-end that says everything back:
 *
 *     struct vnplug_backend_options options;
 *     struct vnplug_news news;
 *     vnplug_backend *backend;
 *
 *     vnplug_backend_options_init(&options);
 *     options.id = 85;
 *     options.name = "echo";
 *     if (vnplug_backend_register(&options, error, sizeof error, &backend) < 0)
 *         errx(1, "%s", error);
 *     vnplug_news_init(&news);
 *     while (vnplug_backend_next(backend, -1, &news) >= 0)
 *         if (news.kind == VNPLUG_NEWS_MESSAGE)
 *             vnplug_backend_send(backend, news.channel, news.bytes, news.len);
 *     errx(1, "%s", vnplug_backend_last_error(backend));
 *
 * and a program that asks it:
 *
 *     struct vnplug_channel_options options;
 *     vnplug_channel *channel;
 *
 *     vnplug_channel_options_init(&options);
 *     options.name = "echo";
 *     if (vnplug_channel_open(&options, error, sizeof error, &channel) < 0)
 *         errx(1, "%s", error);
 *     vnplug_news_init(&news);
 *     vnplug_channel_send(channel, "hello", 5);
 *     while (vnplug_channel_next(channel, -1, &news) >= 0)
 *         if (news.kind == VNPLUG_NEWS_MESSAGE)
 *             printf("%.*s\n", (int)news.len, (const char *)news.bytes);
 *
 * A back-end and a channel serve one thread at a time, for all calls; they may move between threads. Time limits
 * are in milliseconds: less than 0 is none, 0 does not wait. A signal does not end a wait. What
 * comes from the other side are a stranger's bytes.
 *
 * Both live through restarts: of the daemon, of a guest's agent, of the back-end. `next` says
 * VNPLUG_NEWS_GONE, tries again by itself while it waits, and then says VNPLUG_NEWS_BACK. A channel that an operator
 * revoked is not opened again: after VNPLUG_NEWS_GONE `next` says VNPLUG_E_GONE.
 */

/* What happened: vnplug_news.kind. */
enum {
    VNPLUG_NEWS_NONE = 0,    /* nothing until the time was over */
    VNPLUG_NEWS_JOINED = 1,  /* to a back-end: a program connected. channel; text: who, "vm:NAME" or
                                "uid:N", in the daemon's words; label, version: the program's words */
    VNPLUG_NEWS_MESSAGE = 2, /* the other side says bytes, len. To a back-end: channel */
    VNPLUG_NEWS_EVENT = 3,   /* event happened count times more. To a back-end: channel */
    VNPLUG_NEWS_LEFT = 4,    /* to a back-end: channel is over, and its memory. text: why */
    VNPLUG_NEWS_GONE = 5,    /* to a back-end: the daemon is gone, after VNPLUG_NEWS_LEFT of all channels.
                                To a program: the channel is over; memory reads as zeros. text: why */
    VNPLUG_NEWS_BACK = 6,    /* registered again; connected again, by a new channel of which the
                                back-end knows nothing */
    VNPLUG_NEWS_SHARED = 7,  /* to a program: there is memory, region */
    VNPLUG_NEWS_WITHDRAW = 8,/* to a program: let go of region by vnplug_channel_release. After
                                within_ms it is emptied anyway */
    VNPLUG_NEWS_RELEASED = 9 /* to a back-end: the program let go of region by itself, or could not map
                                it. channel; it is unmapped now */
};

/* Longest message in bytes; how many events there may be each way. */
enum { VNPLUG_MAX_SAID = 65536, VNPLUG_MAX_EVENTS = 32 };

/* What happened. Fields that `kind` does not name are 0 or "". Initialise once with vnplug_news_init. */
struct vnplug_news {
    size_t size;          /* set by vnplug_news_init; fields are only appended */
    uint32_t kind;        /* VNPLUG_NEWS_* */
    uint32_t channel;     /* to a back-end: whose; never 0 */
    uint32_t event;       /* 0 to 31 */
    uint32_t region;      /* the number of memory */
    uint64_t count;       /* how often an event happened since it was told last */
    uint32_t version;     /* what the program says that it speaks */
    uint32_t within_ms;   /* how long there is to let go */
    const uint8_t *bytes; /* a message; like the texts valid until the next call of next, or close */
    size_t len;           /* bytes there */
    const char *text;     /* who or why; ends with 0. Escape it before printing */
    const char *label;    /* what a program calls itself: not to be believed */
};

/*
 * Memory that both sides map. The other side may change it at any time, also while you look: copy out, check
 * the copy, and order with atomics (__atomic_load_n with __ATOMIC_ACQUIRE sees what was written before the
 * other side's __ATOMIC_RELEASE). `data` is valid until the next call of next, send, event, share,
 * withdraw, release, hang_up or close on the same handle: ask again afterwards. Until then touching it is never a
 * fault, whatever the other side does, but a store where `writable` is 0.
 */
struct vnplug_memory {
    volatile uint8_t *data;
    uint64_t len;      /* bytes: whole pages */
    uint32_t writable; /* not 0: this side may write */
    uint32_t reserved;
};

/* Who a back-end is. Initialise with vnplug_backend_options_init. */
struct vnplug_backend_options {
    size_t size;         /* set by vnplug_backend_options_init; fields are only appended */
    const char *name;    /* required: as the operator's grant has it */
    const char *socket;  /* NULL = $VNPLUG_SOCKET or /run/vnplug/vnplug.sock */
    uint32_t id;         /* required: as the grant has it */
    uint32_t version;    /* of what it speaks; programs are told */
    uint32_t events_in;  /* events that programs may send it: numbers below this; at most 32 */
    uint32_t events_out; /* events that it sends */
};

/* Whom to connect to. Initialise with vnplug_channel_options_init. */
struct vnplug_channel_options {
    size_t size;        /* set by vnplug_channel_options_init; fields are only appended */
    const char *name;   /* the back-end's name; or NULL, and its number: */
    const char *label;  /* told to the back-end, at most 64 characters; NULL = none */
    const char *socket; /* NULL = $VNPLUG_SOCKET or /run/vnplug/vnplug.sock */
    uint32_t id;        /* the back-end's number, if name is NULL */
    uint32_t version;   /* what this program speaks; told to the back-end */
    uint32_t wait;      /* not 0: if nobody is the back-end yet, open anyway; VNPLUG_NEWS_BACK says when */
    uint32_t reserved;  /* 0 */
};

/* A back-end that may be used from here. */
struct vnplug_backend_info {
    const char *name;
    uint32_t id;
    uint32_t is_there; /* not 0: a process is it now */
    uint32_t version;  /* its version, if it is there */
    uint32_t channels; /* that it has; told to operators, else 0 */
};

static inline void vnplug_backend_options_init(struct vnplug_backend_options *options)
{
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
}

static inline void vnplug_channel_options_init(struct vnplug_channel_options *options)
{
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
}

static inline void vnplug_news_init(struct vnplug_news *news)
{
    memset(news, 0, sizeof *news);
    news->size = sizeof *news;
}

/*
 * Becomes a back-end. On an error *backend is NULL and errbuf (which may be NULL, or errlen 0) gets the
 * reason. VNPLUG_E_DENIED: no grant for this user, number and name. VNPLUG_E_REFUSED: another process is it.
 */
int vnplug_backend_register(const struct vnplug_backend_options *options, char *errbuf, size_t errlen,
                            vnplug_backend **backend);

/*
 * What happened next: 1 and *news, 0 if nothing did for timeout_ms (news->kind is VNPLUG_NEWS_NONE), or an
 * error that time does not heal (the grant is gone).
 */
int vnplug_backend_next(vnplug_backend *backend, int timeout_ms, struct vnplug_news *news);

/*
 * Says something to the program at a channel; `bytes` are copied, and may be those of the last news. 0, or an
 * error. VNPLUG_E_FULL: it has not taken 256 KiB that were said before; nothing was sent: call next, then try
 * again, or hang up. VNPLUG_E_INVALID: the channel is over (which next tells), or more than VNPLUG_MAX_SAID.
 */
int vnplug_backend_send(vnplug_backend *backend, uint32_t channel, const void *bytes, size_t len);

/* An event happened `count` times: 0, or an error. It is never full. */
int vnplug_backend_event(vnplug_backend *backend, uint32_t channel, uint32_t event, uint64_t count);

/*
 * Shares memory with the program at a channel: `bytes` of zeros, rounded up to whole pages, which it may
 * write if `writable` is not 0. Its number is stored in *region. VNPLUG_E_LIMIT: more than the grant permits.
 */
int vnplug_backend_share(vnplug_backend *backend, uint32_t channel, uint64_t bytes, int writable,
                         uint32_t *region);

/* Where memory is mapped: 0 and *memory, or VNPLUG_E_INVALID: there is none of this number (any more). */
int vnplug_backend_memory(vnplug_backend *backend, uint32_t region, struct vnplug_memory *memory);

/*
 * Takes memory back: tells the program, and waits until it lets go, at most within_ms (and a minute). 1: it
 * did. 0: it did not, what it maps are zeros now. Either way the memory is unmapped here. Or an error.
 */
int vnplug_backend_withdraw(vnplug_backend *backend, uint32_t region, uint32_t within_ms);

/* Ends a channel. The program is told the reason (NULL: none). */
int vnplug_backend_hang_up(vnplug_backend *backend, uint32_t channel, const char *reason);

/*
 * A descriptor for poll: readable when next has something to say. Call next with timeout 0 until it returns 0
 * before each wait. Ask for it again after VNPLUG_NEWS_GONE and _BACK, which change it; while the daemon is gone it is
 * never readable: call next now and then. Do not read or close it.
 */
int vnplug_backend_fd(const vnplug_backend *backend);

/* Why the last call that failed on this handle did. Never NULL. */
const char *vnplug_backend_last_error(const vnplug_backend *backend);

/* Ends all its channels and it; NULL is allowed. */
void vnplug_backend_close(vnplug_backend *backend);

/*
 * Opens a channel; errors as of vnplug_backend_register. VNPLUG_E_NOT_FOUND: no such back-end for this program.
 * VNPLUG_E_UNAVAILABLE: nobody is it now (see `wait`). VNPLUG_E_LIMIT: too many channels.
 */
int vnplug_channel_open(const struct vnplug_channel_options *options, char *errbuf, size_t errlen,
                        vnplug_channel **channel);

/* As the functions of a back-end. VNPLUG_E_DISCONNECTED: the channel is not open now (which next tells). */
int vnplug_channel_next(vnplug_channel *channel, int timeout_ms, struct vnplug_news *news);
int vnplug_channel_send(vnplug_channel *channel, const void *bytes, size_t len);
int vnplug_channel_event(vnplug_channel *channel, uint32_t event, uint64_t count);
int vnplug_channel_memory(vnplug_channel *channel, uint32_t region, struct vnplug_memory *memory);

/* Lets go of memory, and unmaps it. Also memory of a channel that is over, which reads as zeros, is kept until
 * then. */
int vnplug_channel_release(vnplug_channel *channel, uint32_t region);

/* The version that the back-end says that it speaks; 0 while the channel is not open. */
uint32_t vnplug_channel_version(const vnplug_channel *channel);

int vnplug_channel_fd(const vnplug_channel *channel);
const char *vnplug_channel_last_error(const vnplug_channel *channel);
void vnplug_channel_close(vnplug_channel *channel);

/*
 * The back-ends that may be used from here: *backends is an array of *count, to be freed with
 * vnplug_backends_free. socket: NULL = the default.
 */
int vnplug_backends(const char *socket, char *errbuf, size_t errlen, struct vnplug_backend_info **backends,
                    size_t *count);

/* Frees what vnplug_backends returned; NULL is allowed. */
void vnplug_backends_free(struct vnplug_backend_info *backends, size_t count);

#ifdef __cplusplus
}
#endif

#endif
