//! The cases of the kernel's own test, `tools/testing/selftests/net/gro.c` (Linux 6.12), by their names there.
//! What we expect is what it expects, but where it says so. All are run over IPv4 and over IPv6, but for those of one
//! of them.

use super::*;

/// Its name, the segments, and of how many each frame is that leaves.
type Case = (&'static str, Vec<Recipe>, Vec<usize>);

#[test]
fn the_kernels_own_cases() {
    const MSS: usize = 1408;
    let segment = |nth: usize, len: usize| Recipe {
        stamp: 0,
        id: nth as u16,
        seq: (nth * MSS) as u32,
        len,
        ..PLAIN
    };
    let with = |nth: usize, len: usize, change: fn(&mut Recipe)| {
        let mut it = segment(nth, len);
        change(&mut it);
        it
    };
    let plain = |_: &mut Recipe| {};
    let cases: Vec<Case> = vec![
        // data
        (
            "data_same",
            vec![
                with(0, 100, plain),
                with(0, 100, |it| (it.seq, it.id) = (100, 1)),
            ],
            vec![2],
        ),
        (
            "data_lrg_sml",
            vec![segment(0, MSS), segment(1, 100)],
            vec![2],
        ),
        (
            "data_sml_lrg",
            vec![segment(0, 100), with(1, MSS, |it| it.seq = 100)],
            vec![1, 1],
        ),
        // ack
        (
            "ack",
            (0..2).map(|nth| with(nth, 0, |it| it.seq = 0)).collect(),
            vec![1, 1],
        ),
        // flags; between two of data
        (
            "flags_psh",
            vec![
                segment(0, MSS),
                with(1, MSS, |it| it.flags |= flag::PSH),
                segment(2, MSS),
            ],
            vec![2, 1],
        ),
        (
            "flags_syn",
            vec![
                segment(0, MSS),
                with(1, 0, |it| it.flags |= flag::SYN),
                with(2, MSS, |it| it.seq = MSS as u32),
            ],
            vec![1, 1, 1],
        ),
        (
            "flags_rst",
            vec![
                segment(0, MSS),
                with(1, 0, |it| it.flags |= flag::RST),
                with(2, MSS, |it| it.seq = MSS as u32),
            ],
            vec![1, 1, 1],
        ),
        (
            "flags_urg",
            vec![
                segment(0, MSS),
                with(1, MSS, |it| it.flags |= flag::URG),
                segment(2, MSS),
            ],
            vec![1, 1, 1],
        ),
        (
            "flags_cwr",
            vec![
                segment(0, MSS),
                with(1, MSS, |it| it.flags |= flag::CWR),
                segment(2, MSS),
                segment(3, MSS),
            ],
            vec![1, 1, 2],
        ),
        // tcp
        (
            "tcp_csum",
            vec![segment(0, MSS), with(1, MSS, |it| it.tags = 9)],
            vec![1, 1],
        ),
        (
            "tcp_seq",
            vec![segment(0, MSS), with(1, MSS, |it| it.seq += 1)],
            vec![1, 1],
        ),
        (
            "tcp_ts",
            vec![
                with(0, MSS, |it| it.stamp = 1),
                with(1, MSS, |it| it.stamp = 1),
                with(2, MSS, |it| it.stamp = 2),
                with(3, MSS, |_| {}),
                with(4, MSS, |it| it.options = &[1, 1, 254, 2]),
            ],
            vec![2, 1, 1, 1],
        ),
        (
            "tcp_opt",
            vec![
                segment(0, MSS),
                segment(1, MSS),
                with(2, MSS, |it| it.options = &[4, 2, 1, 1]),
            ],
            vec![2, 1],
        ),
        // ip; the kernel merges a fixed identification with DF, which virtio-net cannot say
        (
            "ip_ecn",
            vec![segment(0, MSS), with(1, MSS, |it| it.tos = 2)],
            vec![1, 1],
        ),
        (
            "ip_tos",
            vec![segment(0, MSS), with(1, MSS, |it| it.tos = 1 << 4)],
            vec![1, 1],
        ),
        (
            "ip_ttl",
            vec![segment(0, MSS), with(1, MSS, |it| it.ttl = 9)],
            vec![1, 1],
        ),
        (
            "ip_frag4",
            vec![
                segment(0, MSS),
                with(1, MSS, |it| it.fragment = 0x2000),
                with(2, MSS, |it| it.fragment = 1),
            ],
            vec![1, 1, 1],
        ),
        (
            "ip_id_df1_inc",
            vec![segment(0, MSS), segment(1, MSS)],
            vec![2],
        ),
        (
            "ip_id_df1_fixed",
            vec![segment(0, MSS), with(1, MSS, |it| it.id = 0)],
            vec![1, 1],
        ),
        (
            "ip_id_df0_inc",
            vec![
                with(0, MSS, |it| it.fragment = 0),
                with(1, MSS, |it| it.fragment = 0),
            ],
            vec![2],
        ),
        (
            "ip_id_df0_fixed",
            vec![
                with(0, MSS, |it| it.fragment = 0),
                with(1, MSS, |it| (it.fragment, it.id) = (0, 0)),
            ],
            vec![1, 1],
        ),
        (
            "ip_id_df1_inc_fixed",
            vec![
                segment(0, MSS),
                segment(1, MSS),
                with(2, MSS, |it| it.id = 1),
            ],
            vec![2, 1],
        ),
        // the same: neither of the first two, and the other way round than it is there
        (
            "ip_id_df1_fixed_inc",
            vec![
                segment(0, MSS),
                with(1, MSS, |it| it.id = 0),
                with(2, MSS, |it| it.id = 1),
            ],
            vec![1, 2],
        ),
        (
            "ip_opt",
            (0..3).map(|nth| segment(nth, MSS)).collect(),
            vec![1, 1, 1],
        ),
        (
            "ip_frag6",
            (0..4).map(|nth| segment(nth, MSS)).collect(),
            vec![2, 1, 1],
        ),
        // the kernel merges those: virtio-net could say it
        (
            "ip_v6ext_same",
            vec![segment(0, MSS), segment(1, MSS)],
            vec![1, 1],
        ),
        (
            "ip_v6ext_diff",
            vec![segment(0, MSS), segment(1, MSS)],
            vec![1, 1],
        ),
        // large: 64 KiB, and the rest
        (
            "large_max",
            (0..46).map(|nth| segment(nth, MSS)).collect(),
            vec![44, 2],
        ),
        (
            "large_rem",
            (0..45).map(|nth| segment(nth, MSS)).collect(),
            vec![44, 1],
        ),
        // out of order
        (
            "out_of_order",
            vec![segment(0, MSS), segment(2, MSS), segment(1, MSS)],
            vec![1, 1, 1],
        ),
        ("single_segment", vec![segment(0, MSS)], vec![1]),
    ];
    let mut done = [0; 2];
    for (name, recipes, expected) in &cases {
        for is_ipv6 in [false, true] {
            let is_its = match *name {
                "ip_opt" | "ip_frag4" => !is_ipv6,
                name if name.starts_with("ip_id") => !is_ipv6,
                "ip_frag6" | "ip_v6ext_same" | "ip_v6ext_diff" => is_ipv6,
                _ => true,
            };
            if !is_its {
                continue;
            }
            let recipes: Vec<_> = recipes.iter().map(|it| Recipe { is_ipv6, ..*it }).collect();
            let mut frames: Vec<_> = recipes.iter().map(frame).collect();
            match *name {
                "tcp_csum" => frames[1][transport(&recipes[1]) + 16] ^= 1,
                "ip_opt" => with_option(&mut frames[1]),
                "ip_frag6" => {
                    with_header(&mut frames[2], FRAGMENT, [0, 1, 0, 0, 0, 7]);
                    with_header(&mut frames[3], FRAGMENT, [0, 8, 0, 0, 0, 7]);
                }
                "ip_v6ext_same" => {
                    let both = frames.iter_mut();
                    both.for_each(|it| with_header(it, DESTINATION, [1, 4, 1, 1, 1, 1]));
                }
                "ip_v6ext_diff" => {
                    with_header(&mut frames[0], DESTINATION, [1, 4, 1, 1, 1, 1]);
                    with_header(&mut frames[1], DESTINATION, [1, 4, 2, 2, 2, 2]);
                }
                _ => {}
            }
            let frames: Vec<_> = frames.into_iter().map(|it| (it, None)).collect();
            let shape = shape(&merged(44, &frames).0);
            assert_eq!(shape, *expected, "{name}, IPv6 {is_ipv6}");
            done[usize::from(is_ipv6)] += 1;
        }
    }
    assert_eq!(done, [cases.len() - 3, cases.len() - 8]);
}

/// Puts four options that say nothing into an IPv4 header.
fn with_option(frame: &mut Vec<u8>) {
    let len = u16::from_be_bytes([frame[16], frame[17]]) + 4;
    (frame[14], frame[24], frame[25]) = (0x46, 0, 0);
    frame[16..18].copy_from_slice(&len.to_be_bytes());
    frame.splice(34..34, [1; 4]);
    let sum = !samples::folded(&[&frame[14..38]]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
}

/// Puts a header between those of IPv6 and TCP.
fn with_header(frame: &mut Vec<u8>, kind: u8, says: [u8; 6]) {
    let len = u16::from_be_bytes([frame[18], frame[19]]) + 8;
    frame[18..20].copy_from_slice(&len.to_be_bytes());
    frame[20] = kind;
    frame.splice(54..54, [&[6, 0], &says[..]].concat());
}

/// Extension headers (RFC 8200, 4).
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;
