//! The cases of the kernel's own test, `tools/testing/selftests/net/gro.c` (Linux 6.12), by their names there.
//! What we expect is what it expects, but where it says so.

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
    for (name, recipes, expected) in cases {
        let mut frames: Vec<_> = recipes.iter().map(|it| (frame(it), None)).collect();
        if name == "tcp_csum" {
            let mut bad = frame(&segment(1, MSS));
            bad[34 + 16] ^= 1;
            frames[1].0 = bad;
        }
        assert_eq!(shape(&merged(44, &frames).0), expected, "{name}");
    }
}
