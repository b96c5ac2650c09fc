/* Filtering rules on a generator of several flows (argv[1]): one flow dropped, one kind kept. */
#include <stdio.h>
#include <stdlib.h>

#include "pfring.h"

#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!(condition)) {                                                  \
            printf("line %d: %s (errno %d)\n", __LINE__, #condition, errno); \
            exit(1);                                                         \
        }                                                                    \
    } while (0)

static pfring *ring;
static struct pfring_pkthdr h;

/* The next packet's headers. */
static const struct pkt_parsing_info *next(void)
{
    u_char *p = NULL;
    CHECK(pfring_recv_parsed(ring, &p, 0, &h, 1, 4, 0, 0) >= 3);
    return &h.extended_hdr.parsed_pkt;
}

/* Reads what was under way before the last change. */
static void drain(void)
{
    u_char *p = NULL;
    while (pfring_recv(ring, &p, 0, &h, 0) == 1)
        ;
    CHECK(pfring_poll(ring, 20000) == 1);
}

static int is(const struct pkt_parsing_info *a, const hash_filtering_rule *b)
{
    return a->l3_proto == b->proto && a->l4_src_port == b->port_peer_a
        && memcmp(&a->ip_src, &b->host_peer_a, sizeof(ip_addr)) == 0
        && memcmp(&a->ip_dst, &b->host_peer_b, sizeof(ip_addr)) == 0;
}

static void hash(void)
{
    hash_filtering_rule rule, back;
    hash_filtering_rule_stats stats;
    u_int len = sizeof stats;
    const struct pkt_parsing_info *found = next();
    int seen = 0, i;

    memset(&rule, 0, sizeof rule);
    rule.vlan_id = found->vlan_id;
    rule.ip_version = found->ip_version;
    rule.proto = found->l3_proto;
    rule.host_peer_a = found->ip_src, rule.port_peer_a = found->l4_src_port;
    rule.host_peer_b = found->ip_dst, rule.port_peer_b = found->l4_dst_port;
    rule.rule_action = dont_forward_packet_and_stop_rule_evaluation;
    CHECK(pfring_get_hash_filtering_rule_stats(ring, &rule, (char *)&stats, &len) < 0);
    CHECK(pfring_handle_hash_filtering_rule(ring, &rule, 0) < 0);
    CHECK(pfring_handle_hash_filtering_rule(ring, &rule, 1) == 0);
    drain();
    for (i = 0; i < 500; i++)
        CHECK(!is(next(), &rule));
    /* The same rule from the other end. */
    back = rule;
    back.host_peer_a = rule.host_peer_b, back.port_peer_a = rule.port_peer_b;
    back.host_peer_b = rule.host_peer_a, back.port_peer_b = rule.port_peer_a;
    CHECK(pfring_get_hash_filtering_rule_stats(ring, &back, (char *)&stats, &len) == 0);
    CHECK(len == sizeof stats && stats.match > 0 && stats.filtered == stats.match);
    CHECK(stats.match_forward == 0 && stats.inactivity < 60);
    len = 4;
    CHECK(pfring_get_hash_filtering_rule_stats(ring, &back, (char *)&stats, &len) < 0);
    len = sizeof stats;
    CHECK(pfring_purge_idle_hash_rules(ring, 3600) == 0);
    CHECK(pfring_get_hash_filtering_rule_stats(ring, &rule, (char *)&stats, &len) == 0);
    CHECK(pfring_purge_idle_hash_rules(ring, 0) == 0);
    CHECK(pfring_get_hash_filtering_rule_stats(ring, &rule, (char *)&stats, &len)
          == PF_RING_ERROR_INVALID_ARGUMENT);
    for (i = 0; i < 5000 && !seen; i++)
        seen = is(next(), &rule);
    CHECK(seen);
    rule.ip_version = 5;
    CHECK(pfring_handle_hash_filtering_rule(ring, &rule, 1) == PF_RING_ERROR_INVALID_ARGUMENT);
    rule.ip_version = 4, rule.rule_action = reflect_packet_and_stop_rule_evaluation;
    CHECK(pfring_handle_hash_filtering_rule(ring, &rule, 1) == PF_RING_ERROR_NOT_SUPPORTED);
}

static void wildcard(void)
{
    filtering_rule rule, locked;
    hash_filtering_rule_stats stats;
    u_int len = sizeof stats;
    int i;

    /* Only TCP from 10/8 passes. */
    memset(&rule, 0, sizeof rule);
    rule.rule_id = FILTERING_RULE_AUTO_RULE_ID;
    rule.rule_action = forward_packet_and_stop_rule_evaluation;
    rule.core_fields.proto = 6;
    rule.core_fields.shost.v4 = ntohl(inet_addr("10.0.0.0"));
    rule.core_fields.shost_mask.v4 = 0xff000000;
    rule.extended_fields.tunnel.tunnel_id = NO_TUNNEL_ID;
    CHECK(pfring_add_filtering_rule(ring, &rule) == 0);
    CHECK(rule.rule_id != FILTERING_RULE_AUTO_RULE_ID);
    locked = rule;
    locked.rule_id = 77, locked.locked = 1, locked.core_fields.proto = 99;
    CHECK(pfring_add_filtering_rule(ring, &locked) == 0);
    CHECK(pfring_toggle_filtering_policy(ring, 0) == 0 && !ring->socket_default_accept_policy);
    drain();
    for (i = 0; i < 500; i++)
        CHECK(next()->l3_proto == 6 && h.extended_hdr.parsed_pkt.ip_version == 4);
    CHECK(pfring_get_filtering_rule_stats(ring, rule.rule_id, (char *)&stats, &len) == 0);
    CHECK(stats.match >= 500 && stats.match_forward == stats.match && stats.filtered == 0);
    CHECK(pfring_get_filtering_rule_stats(ring, 77, (char *)&stats, &len) == 0 && stats.match == 0);
    /* Purged: all but the locked one. Everything else is refused from then on. */
    CHECK(pfring_purge_idle_rules(ring, 0) == 0);
    CHECK(pfring_get_filtering_rule_stats(ring, rule.rule_id, (char *)&stats, &len) < 0);
    CHECK(pfring_get_filtering_rule_stats(ring, 77, (char *)&stats, &len) == 0);
    CHECK(pfring_remove_filtering_rule(ring, 77) == 0);
    CHECK(pfring_remove_filtering_rule(ring, 77) == PF_RING_ERROR_INVALID_ARGUMENT);
    /* In the order of their numbers: the first that decides. */
    CHECK(pfring_toggle_filtering_policy(ring, 1) == 0);
    rule.rule_id = 20, rule.rule_action = dont_forward_packet_and_stop_rule_evaluation;
    CHECK(pfring_add_filtering_rule(ring, &rule) == 0);
    drain();
    for (i = 0; i < 300; i++)
        CHECK(next()->l3_proto != 6);
    rule.rule_id = 10, rule.rule_action = forward_packet_and_stop_rule_evaluation;
    CHECK(pfring_add_filtering_rule(ring, &rule) == 0);
    for (i = 0; i < 5000 && next()->l3_proto != 6; i++)
        ;
    CHECK(i < 5000);
    /* What the host cannot do is refused. */
    rule.balance_pool = 2;
    CHECK(pfring_add_filtering_rule(ring, &rule) == PF_RING_ERROR_NOT_SUPPORTED);
    rule.balance_pool = 0;
    strcpy(rule.extended_fields.payload_pattern, "GET");
    CHECK(pfring_add_filtering_rule(ring, &rule) == PF_RING_ERROR_NOT_SUPPORTED);
    CHECK(pfring_add_filtering_rule(ring, NULL) == PF_RING_ERROR_INVALID_ARGUMENT);
    CHECK(pfring_set_filtering_mode(ring, hardware_only) == PF_RING_ERROR_NOT_SUPPORTED);
}

int main(int argc, char **argv)
{
    filtering_rule early;
    hash_filtering_rule_stats stats;
    u_int len = sizeof stats;
    CHECK(argc == 2);
    ring = pfring_open(argv[1], 128, 0);
    CHECK(ring != NULL);
    /* Rules are kept over a change that opens the port again. */
    memset(&early, 0, sizeof early);
    early.rule_id = 3, early.rule_action = execute_action_and_continue_rule_evaluation;
    CHECK(pfring_add_filtering_rule(ring, &early) == 0);
    CHECK(pfring_set_application_name(ring, (char *)"rules") == 0);
    CHECK(pfring_enable_ring(ring) == 0);
    next();
    CHECK(pfring_get_filtering_rule_stats(ring, 3, (char *)&stats, &len) == 0 && stats.match > 0);
    CHECK(stats.filtered == 0 && stats.match_forward == 0);
    CHECK(pfring_remove_filtering_rule(ring, 3) == 0);
    hash();
    wildcard();
    pfring_close(ring);
    printf("rules\n");
    return 0;
}
