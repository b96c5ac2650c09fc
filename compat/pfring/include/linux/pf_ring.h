/*
 * linux/pf_ring.h: the data types of the PF_RING API, as vNPlug's libpfring speaks it.
 *
 * Names, values and layouts are those of PF_RING 8.9, so that sources written for it compile
 * unchanged and binaries agree about every offset. The text is vNPlug's own. There is no kernel
 * module here: socket options, ioctls and what only drivers use are left out. pfring.h includes this
 * file; docs/pfring.md says what works.
 *
 * Numbers in parsed headers (IPv4 addresses, ports, ids) are in the host's byte order; IPv6 and MAC
 * addresses are bytes as on the wire.
 */
#ifndef __RING_H
#define __RING_H

#include <netinet/in.h>
#include <sys/time.h>
#include <sys/types.h>

/* The version of the API this header describes. */
#define RING_VERSION "8.9.0"
#define RING_VERSION_NUM 0x080900
#define RING_FLOWSLOT_VERSION 21

/* Sizes. */
#define MIN_NUM_SLOTS 512
#define DEFAULT_NUM_SLOTS 4096
#define DEFAULT_BUCKET_LEN 128
#define MAX_NUM_DEVICES 256
#define MAX_NUM_RING_SOCKETS 512
#define MAX_NUM_LIST_ELEMENTS MAX_NUM_RING_SOCKETS
#define MAX_CLUSTER_QUEUES 64
#define MAX_NUM_RX_CHANNELS 64
#define UNKNOWN_NUM_RX_CHANNELS 1
#define DEFAULT_MIN_PKT_QUEUED 128
#define DEFAULT_POLL_WATERMARK_TIMEOUT 0
#define FILTERING_SAMPLING_RATIO 10
#define DEFAULT_RING_HASH_SIZE 4096
#define REFLECTOR_NAME_LEN 8
#define MAX_NUM_PATTERN 32

#ifndef ETH_ALEN
#define ETH_ALEN 6
#endif
#ifndef IFNAMSIZ
#define IFNAMSIZ 16
#endif

/* What calls return when they fail. */
#define PF_RING_ERROR_GENERIC -1
#define PF_RING_ERROR_INVALID_ARGUMENT -2
#define PF_RING_ERROR_NO_PKT_AVAILABLE -3
#define PF_RING_ERROR_NO_TX_SLOT_AVAILABLE -4
#define PF_RING_ERROR_WRONG_CONFIGURATION -5
#define PF_RING_ERROR_END_OF_DEMO_MODE -6
#define PF_RING_ERROR_NOT_SUPPORTED -7
#define PF_RING_ERROR_INVALID_LIB_VERSION -8
#define PF_RING_ERROR_UNKNOWN_ADAPTER -9
#define PF_RING_ERROR_NOT_ENOUGH_MEMORY -10
#define PF_RING_ERROR_INVALID_STATUS -11
#define PF_RING_ERROR_RING_NOT_ENABLED -12
#define PF_RING_ERROR_BAD_IFNAME -13
#define PF_RING_ERROR_MOD_NOT_LOADED -14
#define PF_RING_ERROR_UNABLE_TO_MAP -15
#define PF_RING_ERROR_UNABLE_TO_GET_INFO -16
#define PF_RING_ERROR_MMAP_FAILURE -17
#define PF_RING_ERROR_INIT_FAILURE -18

/* ---- addresses and protocol headers ---- */

/* An address of either family; `v4` in the host's byte order, `v6` as on the wire. */
typedef union {
    struct in6_addr v6;
    u_int32_t v4;
} ip_addr;

#define ipv4_tos ip_tos
#define ipv6_tos ip_tos
#define ipv4_src ip_src.v4
#define ipv4_dst ip_dst.v4
#define ipv6_src ip_src.v6
#define ipv6_dst ip_dst.v6
#define host4_low host_low.v4
#define host4_high host_high.v4
#define host6_low host_low.v6
#define host6_high host_high.v6
#define host4_peer_a host_peer_a.v4
#define host4_peer_b host_peer_b.v4
#define host6_peer_a host_peer_a.v6
#define host6_peer_b host_peer_b.v6

#ifndef IN6ADDR_ANY_INIT
#define IN6ADDR_ANY_INIT { { { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 } } }
#endif

/* IPv6 extension headers. */
#define NEXTHDR_HOP 0
#define NEXTHDR_IPV6 41
#define NEXTHDR_ROUTING 43
#define NEXTHDR_FRAGMENT 44
#define NEXTHDR_ESP 50
#define NEXTHDR_AUTH 51
#define NEXTHDR_NONE 59
#define NEXTHDR_DEST 60
#define NEXTHDR_MOBILITY 135

struct eth_vlan_hdr {
    u_int16_t h_vlan_id;
    u_int16_t h_proto;
} __attribute__((packed));

struct kcompact_ipv6_hdr {
    u_int32_t flow_lbl : 24, priority : 4, version : 4;
    u_int16_t payload_len;
    u_int8_t nexthdr;
    u_int8_t hop_limit;
    struct in6_addr saddr;
    struct in6_addr daddr;
} __attribute__((packed));

struct kcompact_ipv6_opt_hdr {
    u_int8_t nexthdr;
    u_int8_t hdrlen;
    u_int8_t padding[6];
} __attribute__((packed));

#define GRE_HEADER_CHECKSUM 0x8000
#define GRE_HEADER_ROUTING 0x4000
#define GRE_HEADER_KEY 0x2000
#define GRE_HEADER_SEQ_NUM 0x1000
#define GRE_HEADER_VERSION 0x0007

struct gre_header {
    u_int16_t flags_and_version;
    u_int16_t proto;
} __attribute__((packed));

#define GTP_SIGNALING_PORT 2123
#define GTP_U_DATA_PORT 2152
#define GTP_VERSION_1 0x1
#define GTP_VERSION_2 0x2
#define GTP_PROTOCOL_TYPE 0x1
#define GTP_FLAGS_VERSION 0xE0
#define GTP_FLAGS_VERSION_SHIFT 5
#define GTP_FLAGS_PROTOCOL_TYPE 0x10
#define GTP_FLAGS_RESERVED 0x08
#define GTP_FLAGS_EXTENSION 0x04
#define GTP_FLAGS_SEQ_NUM 0x02
#define GTP_FLAGS_NPDU_NUM 0x01
#define GTP_EXT_HDR_LEN_UNIT_BYTES 4

struct gtp_v1_hdr {
    u_int8_t flags;
    u_int8_t message_type;
    u_int16_t payload_len;
    u_int32_t teid;
} __attribute__((packed));

struct gtp_v1_opt_hdr {
    u_int16_t seq_num;
    u_int8_t npdu_num;
    u_int8_t next_ext_hdr;
} __attribute__((packed));

struct gtp_v1_ext_hdr {
    u_int8_t len; /* in units of 4 bytes */
} __attribute__((packed));

#define MOBILE_IP_PORT 434
#define VXLAN_IP_PORT 4789

struct mobile_ip_hdr {
    u_int8_t message_type, next_header;
    u_int16_t reserved;
} __attribute__((packed));

struct vxlan_hdr {
    u_int8_t flags[2];
    u_int16_t gdp;
    u_int8_t vni[3];
    u_int8_t res;
} __attribute__((packed));

/* ---- a packet's header ---- */

#define NO_TUNNEL_ID 0xFFFFFFFF
#define UNKNOWN_INTERFACE -1
#define FAKE_PACKET -2

typedef enum { long_pkt_header = 0, short_pkt_header } pkt_header_len;

/* Where headers start, in bytes from the start of the packet; 0 = not found. */
struct pkt_offset {
    int16_t eth_offset;
    int16_t vlan_offset;
    int16_t l3_offset;
    int16_t l4_offset;
    int16_t payload_offset;
} __attribute__((packed));

/* What is inside a tunnel (GTP, GRE, VXLAN); tunnel_id is NO_TUNNEL_ID where there is none. */
typedef struct {
    u_int32_t tunnel_id;
    u_int8_t tunneled_dmac[ETH_ALEN], tunneled_smac[ETH_ALEN];
    u_int16_t tunneled_eth_type;
    u_int8_t tunneled_ip_version;
    u_int8_t tunneled_proto;
    ip_addr tunneled_ip_src, tunneled_ip_dst;
    u_int16_t tunneled_l4_src_port, tunneled_l4_dst_port;
} __attribute__((packed)) tunnel_info;

struct pkt_parsing_info {
    u_int8_t dmac[ETH_ALEN], smac[ETH_ALEN];
    u_int16_t eth_type;     /* after VLAN tags */
    u_int16_t vlan_id;      /* outer tag; 0 = none */
    u_int16_t qinq_vlan_id; /* second tag; 0 = none */
    u_int8_t ip_version;    /* 4, 6, or 0 */
    u_int8_t l3_proto;      /* TCP, UDP, …: the number in the IP header */
    u_int8_t ip_tos;
    ip_addr ip_src, ip_dst;
    u_int16_t l4_src_port, l4_dst_port;
    u_int8_t icmp_type, icmp_code;
    struct {
        u_int8_t flags;
        u_int32_t seq_num, ack_num;
    } tcp;
    tunnel_info tunnel;
    int32_t last_matched_rule_id;
    struct pkt_offset offset;
} __attribute__((packed));

/* Bits of pfring_extended_pkthdr.flags. */
#define PKT_FLAGS_CHECKSUM_OFFLOAD 1 << 0
#define PKT_FLAGS_CHECKSUM_OK 1 << 1
#define PKT_FLAGS_IP_MORE_FRAG 1 << 2
#define PKT_FLAGS_IP_FRAG_OFFSET 1 << 3
#define PKT_FLAGS_VLAN_HWACCEL 1 << 4
#define PKT_FLAGS_FLOW_HIT 1 << 5
#define PKT_FLAGS_FLOW_MISS 1 << 6
#define PKT_FLAGS_FLOW_UNHANDLED 1 << 7

struct pfring_extended_pkthdr {
    u_int64_t timestamp_ns; /* since 1970-01-01 UTC */
    u_int32_t flags;        /* PKT_FLAGS_* */
    u_int8_t rx_direction;  /* 1 = received by the interface, 0 = sent by it */
    u_int8_t port_id;
    u_int16_t device_id;
    int32_t if_index; /* interface, where it is known; else UNKNOWN_INTERFACE */
    u_int32_t pkt_hash; /* symmetric flow hash */
    struct {
        int32_t bounce_interface;
        struct sk_buff *reserved;
    } tx;
    struct {
        u_int32_t pid;
    } process;
    struct pkt_parsing_info parsed_pkt; /* last; see PF_RING_LONG_HEADER */
} __attribute__((packed));

/* The first members are those of struct pcap_pkthdr. */
struct pfring_pkthdr {
    struct timeval ts;
    u_int32_t caplen;
    u_int32_t len;
    struct pfring_extended_pkthdr extended_hdr;
} __attribute__((packed));

#define RING_MIN_SLOT_SIZE (60 + sizeof(struct pfring_pkthdr))
#define RING_MAX_SLOT_SIZE (1514 + sizeof(struct pfring_pkthdr))

#if !defined(__cplusplus)
#define min_val(a, b) ((a < b) ? a : b)
#define max_val(a, b) ((a > b) ? a : b)
#endif

/* ---- software filtering rules ---- */

#define FILTERING_RULE_AUTO_RULE_ID 0xFFFF
#define FILTER_TUNNEL_ID_FLAG 1 << 0

typedef enum {
    forward_packet_and_stop_rule_evaluation = 0,
    dont_forward_packet_and_stop_rule_evaluation,
    execute_action_and_continue_rule_evaluation,
    execute_action_and_stop_rule_evaluation,
    forward_packet_add_rule_and_stop_rule_evaluation,
    reflect_packet_and_stop_rule_evaluation,
    reflect_packet_and_continue_rule_evaluation,
    bounce_packet_and_stop_rule_evaluation,
    bounce_packet_and_continue_rule_evaluation
} rule_action_behaviour;

typedef enum { pkt_detail_flow, pkt_detail_aggregation } pkt_detail_mode;

typedef enum {
    rx_and_tx_direction = 0,
    rx_only_direction,
    tx_only_direction
} packet_direction;

typedef enum {
    send_and_recv_mode = 0,
    send_only_mode,
    recv_only_mode,
    management_only_mode
} socket_mode;

/* Fields of a wildcard rule; 0 = any. */
typedef struct {
    int32_t if_index;
    u_int8_t smac[ETH_ALEN], dmac[ETH_ALEN];
    u_int16_t vlan_id;
    u_int16_t eth_type;
    u_int8_t proto;
    ip_addr shost, dhost;
    ip_addr shost_mask, dhost_mask;
    u_int16_t sport_low, sport_high; /* inclusive; high = 0: any */
    u_int16_t dport_low, dport_high;
    struct {
        u_int8_t flags;
    } tcp;
} __attribute__((packed)) filtering_rule_core_fields;

typedef struct {
    u_int16_t optional_fields; /* FILTER_TUNNEL_ID_FLAG */
    struct {
        u_int32_t tunnel_id;
        ip_addr shost, dhost;
        ip_addr shost_mask, dhost_mask;
    } tunnel;
    char payload_pattern[32];
} __attribute__((packed)) filtering_rule_extended_fields;

/* Not for applications. */
typedef struct {
    unsigned long jiffies_last_match;
    struct net_device *reflector_dev;
} __attribute__((packed)) filtering_internals;

/* A wildcard rule. Rules are looked at from the lowest id to the highest. */
typedef struct {
    u_int16_t rule_id; /* FILTERING_RULE_AUTO_RULE_ID: the library chooses and stores it here */
    rule_action_behaviour rule_action;
    u_int8_t balance_id, balance_pool;
    u_int8_t locked;        /* not purged when idle */
    u_int8_t bidirectional; /* also with source and destination exchanged */
    filtering_rule_core_fields core_fields;
    filtering_rule_extended_fields extended_fields;
    char reflector_device_name[REFLECTOR_NAME_LEN];
    filtering_internals internals;
} __attribute__((packed)) filtering_rule;

/* A hash rule: one flow in both directions, no wildcards. */
typedef struct {
    u_int16_t rule_id;
    u_int16_t vlan_id; /* 0 = untagged */
    u_int8_t ip_version;
    u_int8_t proto;
    ip_addr host_peer_a, host_peer_b;
    u_int16_t port_peer_a, port_peer_b;
    rule_action_behaviour rule_action;
    char reflector_device_name[REFLECTOR_NAME_LEN];
    filtering_internals internals;
} __attribute__((packed)) hash_filtering_rule;

typedef struct {
    u_int64_t match;         /* packets that matched the rule */
    u_int64_t filtered;      /* of these, dropped */
    u_int64_t match_forward; /* of these, forwarded */
    u_int32_t inactivity;    /* seconds since the last match */
} __attribute__((packed)) hash_filtering_rule_stats;

/* ---- hardware rules: types only, adding one is not supported ---- */

typedef struct {
    u_int8_t proto;
    u_int32_t s_addr, d_addr;
    u_int16_t s_port, d_port;
    u_int16_t queue_id;
} __attribute__((packed)) intel_82599_five_tuple_filter_hw_rule;

typedef struct {
    u_int16_t vlan_id;
    u_int8_t proto;
    u_int32_t s_addr, d_addr;
    u_int16_t s_port, d_port;
    u_int16_t queue_id;
} __attribute__((packed)) intel_82599_perfect_filter_hw_rule;

typedef enum { drop_rule, redirect_rule, mirror_rule } silicom_redirector_rule_type;

typedef struct {
    silicom_redirector_rule_type rule_type;
    u_int8_t rule_port;
    u_int8_t rule_target_port;
    u_int16_t vlan_id_low, vlan_id_high;
    u_int8_t l3_proto;
    ip_addr src_addr, dst_addr;
    u_int32_t src_mask, dst_mask;
    u_int16_t src_port_low, src_port_high;
    u_int16_t dst_port_low, dst_port_high;
} __attribute__((packed)) silicom_redirector_hw_rule;

typedef enum { default_pass, default_drop } generic_default_action_type;

typedef enum {
    flow_drop_rule,
    flow_mark_rule,
    flow_pass_rule,
    flow_steer_rule,
    flow_unlearn_rule
} generic_flow_rule_action_type;

typedef struct {
    generic_flow_rule_action_type action;
    u_int64_t flow_id;
    u_int32_t thread;
} __attribute__((packed)) generic_flow_id_hw_rule;

typedef struct {
    generic_flow_rule_action_type action;
    ip_addr src_ip;
    ip_addr dst_ip;
    ip_addr src_ip_mask;
    ip_addr dst_ip_mask;
    u_int16_t src_port;
    u_int16_t dst_port;
    u_int16_t vlan_id;
    u_int8_t ip_version;
    u_int8_t protocol;
    u_int8_t interface;
    u_int8_t queue_id;
    u_int64_t flow_id;
} __attribute__((packed)) generic_flow_tuple_hw_rule;

typedef enum {
    intel_82599_five_tuple_rule,
    intel_82599_perfect_filter_rule,
    silicom_redirector_rule,
    generic_flow_id_rule,
    generic_flow_tuple_rule
} hw_filtering_rule_type;

typedef struct {
    hw_filtering_rule_type rule_family_type;
    u_int16_t rule_id;
    u_int16_t priority;
    union {
        intel_82599_five_tuple_filter_hw_rule five_tuple_rule;
        intel_82599_perfect_filter_hw_rule perfect_rule;
        silicom_redirector_hw_rule redirector_rule;
        generic_flow_id_hw_rule flow_id_rule;
        generic_flow_tuple_hw_rule flow_tuple_rule;
    } rule_family;
} __attribute__((packed)) hw_filtering_rule;

#define MAGIC_HW_FILTERING_RULE_REQUEST 0x29010020

typedef enum { add_hw_rule, remove_hw_rule } hw_filtering_rule_command;

/* ---- flow offload: types only ---- */

struct pfring_timespec {
    u_int32_t tv_sec;
    u_int32_t tv_nsec;
} __attribute__((packed));

#define PF_RING_FLOW_UPDATE_CAUSE_SW 0
#define PF_RING_FLOW_UPDATE_CAUSE_TIMEOUT 1
#define PF_RING_FLOW_UPDATE_CAUSE_TCP_TERM 2
#define PF_RING_FLOW_UPDATE_CAUSE_PROBE 4
#define PF_RING_FLOW_UPDATE_CAUSE_UNKNOWN 5

typedef struct {
    u_int64_t flow_id;
    u_int8_t cause;
    u_int8_t reserved0;
    u_int16_t reserved1;
    u_int16_t flags_a;
    u_int16_t flags_b;
    u_int32_t packets_a;
    u_int32_t packets_b;
    u_int64_t bytes_a;
    u_int64_t bytes_b;
    struct pfring_timespec last_seen;
} __attribute__((packed)) pfring_flow_update;

typedef struct {
    u_int32_t flow_id;
    u_int8_t ip_version;
    u_int8_t l4_protocol;
    u_int8_t tos;
    u_int8_t tcp_flags;
    ip_addr src_ip;
    ip_addr dst_ip;
    u_int16_t vlan_id;
    u_int8_t start_of_flow;
    u_int8_t reserved;
    u_int16_t src_port;
    u_int16_t dst_port;
    u_int32_t fwd_packets;
    u_int32_t rev_packets;
    u_int64_t fwd_bytes;
    u_int64_t rev_bytes;
    struct pfring_timespec fwd_ts_first;
    struct pfring_timespec fwd_ts_last;
    struct pfring_timespec rev_ts_first;
    struct pfring_timespec rev_ts_last;
} __attribute__((packed)) generic_flow_update;

typedef struct {
    generic_flow_rule_action_type action;
    u_int32_t flow_id;
} __attribute__((packed)) generic_flow_feedback;

/* ---- rings and clusters ---- */

#define PF_RING 27
#define SOCK_RING PF_RING
#define RING_ANY_CHANNEL ((u_int64_t)-1)
#define RING_ANY_VLAN ((u_int16_t)0xFFFF)
#define RING_NO_VLAN ((u_int16_t)0)

/* The head of a kernel ring. libpfring of vNPlug has no such ring; the type keeps layouts. */
typedef struct flowSlotInfo {
    u_int16_t version, sample_rate;
    u_int32_t min_num_slots, slot_len, data_len;
    u_int64_t tot_mem;
    volatile u_int64_t insert_off;
    u_int64_t kernel_remove_off;
    u_int64_t tot_pkts, tot_lost;
    volatile u_int64_t tot_insert;
    u_int64_t kernel_tot_read;
    u_int64_t tot_fwd_ok, tot_fwd_notok;
    u_int64_t good_pkt_sent, pkt_send_error;
    char padding[128 - 104];
    char k_padding[4096 - 128];
    volatile u_int64_t tot_read;
    volatile u_int64_t remove_off;
    char u_padding[4096 - 16];
} __attribute__((packed)) FlowSlotInfo;

/* How the members of a cluster share packets. See docs/pfring.md for what each becomes here. */
typedef enum {
    cluster_per_flow = 0,
    cluster_round_robin,
    cluster_per_flow_2_tuple,
    cluster_per_flow_4_tuple,
    cluster_per_flow_5_tuple,
    cluster_per_flow_tcp_5_tuple,
    cluster_per_inner_flow,
    cluster_per_inner_flow_2_tuple,
    cluster_per_inner_flow_4_tuple,
    cluster_per_inner_flow_5_tuple,
    cluster_per_inner_flow_tcp_5_tuple,
    cluster_per_flow_ip_5_tuple,
    cluster_per_inner_flow_ip_5_tuple,
    cluster_per_flow_ip_with_dup_tuple
} cluster_type;

#define MAX_CLUSTER_TYPE_ID cluster_per_flow_ip_with_dup_tuple
#define CLUSTER_OPTION_RELAXED_DISTRIBUTION (1 << 0)

struct add_to_cluster {
    u_int16_t cluster_id;
    u_int16_t queue_id;
    u_int32_t options;
    cluster_type the_type;
} __attribute__((packed));

typedef enum { cluster_slave = 0, cluster_master = 1 } cluster_client_type;

typedef enum { standard_nic_family = 0, intel_82599_family } pfring_device_type;

typedef struct {
    char device_name[IFNAMSIZ];
    pfring_device_type device_type;
    struct proc_dir_entry *proc_entry;
} __attribute__((packed)) virtual_filtering_device_info;

#endif
