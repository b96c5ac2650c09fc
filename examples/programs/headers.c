/* Cuts what IPv4 carries behind its transport header, and makes the last number of each address 0, for
 * readers that need no more.
 *
 *     clang -O2 -g -target bpf -I /usr/include/$(uname -m)-linux-gnu -c headers.c -o headers.o
 *     vnplugd --source eth1=af_packet,program=headers --program headers=headers.o
 *
 * Of the source, so that nobody has more. A port may ask for it as well, and need not: to have a program is no
 * restriction.
 *
 * The checksum of the IPv4 header is right again (RFC 1624); those of TCP and UDP are not, as what they sum is
 * not there.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

static __always_inline void hide(struct iphdr *ip, __be32 *address)
{
    __be32 hidden = *address & bpf_htonl(0xffffff00);
    __s64 sum = bpf_csum_diff(address, 4, &hidden, 4, ~ip->check & 0xffff);

    *address = hidden;
    sum = (sum & 0xffff) + (sum >> 16 & 0xffff);
    sum = (sum & 0xffff) + (sum >> 16);
    ip->check = ~sum;
}

SEC("xdp")
int headers(struct xdp_md *ctx)
{
    void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
    struct ethhdr *ethernet = data;
    struct iphdr *ip = (void *)(ethernet + 1);
    __u32 keep;

    if ((void *)(ip + 1) > end || ethernet->h_proto != bpf_htons(ETH_P_IP))
        return XDP_DROP;
    hide(ip, &ip->saddr);
    hide(ip, &ip->daddr);
    keep = sizeof(*ethernet) + ip->ihl * 4;
    if (ip->protocol == IPPROTO_TCP)
        keep += sizeof(struct tcphdr);
    else if (ip->protocol == IPPROTO_UDP)
        keep += sizeof(struct udphdr);
    if (data + keep < end && bpf_xdp_adjust_tail(ctx, (int)keep - (int)(end - data)))
        return XDP_ABORTED;
    return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
