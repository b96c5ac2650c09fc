/* Lets the first packets of each flow pass, and drops the rest: what a recorder of encrypted traffic wants.
 *
 *     clang -O2 -g -target bpf -I /usr/include/$(uname -m)-linux-gnu -c first.c -o first.o
 *     vnplugd --source eth1 --program first=first.o
 *     vnplug record eth1 --program first …
 *
 * A flow is a place in a table of 65,536; two flows may share one, and then share its packets.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define FLOWS 65536

/* How many packets of a flow pass. */
volatile const __u32 most = 10;

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, FLOWS);
    __type(key, __u32);
    __type(value, __u32);
} flows SEC(".maps");

/* What was dropped, for `vnplug programs first --map .bss`. */
__u64 dropped;

/* The same both ways. */
static __noinline __u32 place(__u32 one, __u32 other, __u32 ports)
{
    __u32 hash = (one ^ other) * 0x9e3779b1;

    hash ^= (ports ^ ports >> 16) * 0x85ebca6b;
    return (hash ^ hash >> 15) % FLOWS;
}

SEC("xdp")
int first(struct xdp_md *ctx)
{
    void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
    struct ethhdr *ethernet = data;
    struct iphdr *ip = (void *)(ethernet + 1);
    __u32 ports = 0, key, *seen;

    if ((void *)(ip + 1) > end || ethernet->h_proto != bpf_htons(ETH_P_IP))
        return XDP_PASS;
    if (ip->protocol == IPPROTO_TCP || ip->protocol == IPPROTO_UDP) {
        __u16 *port = (void *)ip + ip->ihl * 4;

        if ((void *)(port + 2) <= end)
            ports = port[0] ^ port[1];
    }
    key = place(ip->saddr, ip->daddr, ports);
    seen = bpf_map_lookup_elem(&flows, &key);
    if (!seen)
        return XDP_PASS;
    if (*seen < most) {
        __sync_fetch_and_add(seen, 1);
        return XDP_PASS;
    }
    __sync_fetch_and_add(&dropped, 1);
    return XDP_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
