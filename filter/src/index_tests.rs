use super::*;
use crate::differential::EXPRESSIONS;
use crate::libpcap::Library;
use crate::packets;
use crate::packets::{Packet, Random};
use crate::{Instruction, Trust};
use vnplug_ring::layout::flags;

/// Filters of the kinds that many ports have, over what the packets are drawn from.
fn expression(random: &mut Random) -> String {
    let host = random.pick(&[
        "10.0.0.1",
        "10.0.0.2",
        "192.168.3.4",
        "224.0.0.1",
        "10.0.0.77",
    ]);
    let six = random.pick(&[
        "2001:db8::",
        "2001:db8::1",
        "2001:db8::2",
        "fe80::1",
        "2001:db8::77",
    ]);
    let port = random.pick(&[80, 443, 53, 22, 5_000, 999, 1_000, 6_081]);
    let vlan = random.pick(&[5, 7, 9]);
    let prefix = random.pick(&[9, 16, 24, 25, 31]);
    let way = random.pick(&["src ", "dst ", ""]);
    let what = match random.below(20) {
        0 | 1 => format!("{way}host {host}"),
        2 => format!("ip6 {way}host {six}"),
        3 => format!("{way}net {host}/{prefix}")
            .replace(host, random.pick(&["10.0.0.0", "192.128.0.0"])),
        4 => format!("ip6 {way}net 2001:db8::/{}", random.pick(&[32, 48, 64])),
        5 => format!("{way}port {port}"),
        6 => format!("tcp {way}port {port} and {way}host {host}"),
        7 => format!("vlan {vlan} and {way}host {host}"),
        8 => format!("ether {way}host 02:00:00:00:00:0{}", random.below(4)),
        9 => format!("{way}portrange {}-{port}", port / 2),
        10 => format!("not {way}host {host}"),
        11 => format!(
            "vlan {vlan} and vlan {} and udp {way}port {port}",
            random.pick(&[5, 7, 9])
        ),
        12 => random.pick(PROTOCOLS).to_owned(),
        13 => format!(
            "{} {way}portrange {}-{}",
            random.pick(&["tcp", "udp", "ip", "ip6"]),
            port - random.below(20),
            port + random.below(4_000)
        ),
        14 => format!("{} and {way}port {port}", random.pick(PROTOCOLS)),
        15 => format!("{} or {way}host {host}", random.pick(PROTOCOLS)),
        16 => {
            let (at, len) = random.pick(&[(2, 2), (8, 1), (12, 4), (0, 1), (9, 1)]);
            let low = random.below(300);
            let high = low + random.below(0xff00);
            format!("ip[{at}:{len}] >= {low} and ip[{at}:{len}] <= {high}")
        }
        17 => format!(
            "udp[4:2] {} {}",
            random.pick(&["<", ">", "<=", ">="]),
            random.below(200)
        ),
        18 => format!("vlan {vlan} and {}", random.pick(PROTOCOLS)),
        _ => random.pick(EXPRESSIONS).to_owned(),
    };
    match random.below(5) {
        0 if !what.contains("vlan") => format!("({what}) or {way}port {}", port + 1),
        1 if !what.contains("vlan") => format!("{what} and not src port {port}"),
        _ => what,
    }
}

/// What many frames have.
const PROTOCOLS: &[&str] = &[
    "ip",
    "ip6",
    "arp",
    "rarp",
    "tcp",
    "udp",
    "icmp",
    "icmp6",
    "sctp",
    "ip proto 89",
    "ip6 proto 58",
    "ether proto 0x8847",
    "tcp[13] & 2 != 0",
    "ip[0] & 0xf = 5",
    "not tcp",
    "greater 100",
];

fn compiled(library: &Library, random: &mut Random) -> (Arc<Program>, Vec<Instruction>) {
    loop {
        let text = std::ffi::CString::new(expression(random)).unwrap();
        // Some mixtures contradict themselves, which libpcap says at once.
        if let Ok(list) = library.compile(&text, 262_144, 1) {
            let program = Program::from_instructions(&list, Trust::Operator).unwrap();
            return (Arc::new(program), list);
        }
    }
}

fn frame(packet: &Packet, outbound: bool) -> Frame<'_> {
    Frame {
        bytes: &packet.0,
        wire_len: packet.1,
        ts_ns: 0,
        flags: if outbound { flags::OUTBOUND } else { 0 },
        vlan_tci: 0,
        ..Frame::default()
    }
}

#[test]
fn decisions_are_libpcaps_for_a_million_pairs_while_filters_come_and_go() {
    compare(1_200_000, 0xc0ffee);
}

#[test]
#[ignore = "takes minutes: cargo test --release -p vnplugd decisions_for_long -- --ignored --nocapture"]
fn decisions_for_long() {
    let rounds = std::env::var("ROUNDS").map_or(100, |it| it.parse().unwrap());
    (1..=rounds).for_each(|seed| compare(1_200_000, seed));
}

/// Compares this many decisions of an index with libpcap's.
fn compare(at_least: u64, seed: u64) {
    let library = Library::load().unwrap();
    let packets = packets::frames(20_000, seed ^ 0x1d5);
    let mut random = Random(seed);
    let pool: Vec<_> = (0..400).map(|_| compiled(&library, &mut random)).collect();
    let references: Vec<_> = pool
        .iter()
        .map(|(_, list)| library.reference(list).unwrap())
        .collect();
    let mut index = Index::default();
    // What is in it: which of the pool, as what, and what it accepted so far.
    let mut inside: Vec<(usize, JudgeId, Totals)> = Vec::new();
    let (mut pairs, mut accepted) = (0_u64, 0_u64);
    let mut round = 0;
    while pairs < at_least {
        round += 1;
        for _ in 0..random.below(12) {
            if inside.len() > 150 || !inside.is_empty() && random.one_in(3) {
                let (_, id, _) = inside.swap_remove(random.below(inside.len()));
                index.remove(id);
            } else {
                let which = random.below(pool.len());
                let id = index.add(&pool[which].0);
                inside.push((which, id, index.totals(id)));
            }
        }
        let mut outbound = FrameSet::default();
        let count = random.pick(&[1, 2, 64, 65, MAX_BATCH]);
        let frames: Vec<Frame<'_>> = (0..count)
            .map(|place| {
                let sent = random.one_in(3);
                if sent {
                    outbound.insert(place);
                }
                frame(&packets[random.below(packets.len())], sent)
            })
            .collect();
        let all = index.judge(&frames, &outbound);
        for (which, id, totals) in &mut inside {
            let mut theirs = FrameSet::default();
            for (place, frame) in frames.iter().enumerate() {
                if references[*which].run(frame.bytes, frame.wire_len) != 0 {
                    theirs.insert(place);
                }
            }
            assert_eq!(
                index.accepted(*id),
                theirs,
                "round {round}: {:?}",
                pool[*which].0
            );
            assert_eq!(all.and(&theirs), theirs);
            totals.frames += theirs.len();
            totals.outbound += theirs.and(&outbound).len();
            assert_eq!(index.totals(*id), *totals, "round {round}");
            pairs += count as u64;
            accepted += theirs.len();
        }
        index.forget();
    }
    let IndexSize {
        keyed,
        scanned,
        fields,
    } = index.size();
    println!(
        "{pairs} pairs, {accepted} accepted; at the end {keyed} keyed, {scanned} not, {fields} fields"
    );
    assert!(
        accepted > pairs / 100 && keyed > scanned,
        "{pairs} {accepted} {keyed} {scanned}"
    );
    for (_, id, _) in inside {
        index.remove(id);
    }
    assert_eq!(index.size(), IndexSize::default());
}

#[test]
fn equal_programs_are_one_and_its_followers_are_told() {
    let library = Library::load().unwrap();
    let list = library.compile(c"host 10.0.0.1", 262_144, 1).unwrap();
    let program = || Arc::new(Program::from_instructions(&list, Trust::Guest).unwrap());
    let mut index = Index::default();
    let ids = [index.add(&program()), index.add(&program())];
    assert_eq!((ids[0], index.size().keyed), (ids[1], 1));
    index.follow(ids[0], 7);
    index.follow(ids[1], 8);
    let mut bytes = vec![0; 60];
    bytes[12..14].copy_from_slice(&[8, 0]);
    bytes[26..30].copy_from_slice(&[10, 0, 0, 1]);
    let packet = (bytes, 60);
    let frames = [frame(&packet, false)];
    index.judge(&frames, &FrameSet::default());
    assert_eq!(index.touched(), 1);
    assert_eq!(index.wanted(0), (&[7, 8][..], FrameSet::first(1)));
    index.forget();
    index.unfollow(ids[0], 7);
    index.remove(ids[0]);
    index.judge(&frames, &FrameSet::default());
    assert_eq!(index.wanted(0).0, [8]);
    index.forget();
    index.remove(ids[1]);
    index.judge(&frames, &FrameSet::default());
    assert_eq!((index.touched(), index.size()), (0, IndexSize::default()));
}

#[test]
fn without_room_for_another_field_a_program_is_run_on_every_frame() {
    let mut index = Index::default();
    let program = |at: u32| {
        let word = Instruction {
            code: vnplug_bpf::code::LD_W_ABS,
            jt: 0,
            jf: 0,
            k: at,
        };
        let compare = Instruction {
            code: vnplug_bpf::code::JEQ_K,
            jt: 0,
            jf: 1,
            k: 0x0102_0304,
        };
        let ret = |k| Instruction {
            code: vnplug_bpf::code::RET,
            jt: 0,
            jf: 0,
            k,
        };
        let list = [word, compare, ret(1), ret(0)];
        Arc::new(Program::from_instructions(&list, Trust::Guest).unwrap())
    };
    let most = crate::lookup::MAX_FIELDS as u32;
    let ids: Vec<JudgeId> = (0..most + 10)
        .map(|at| index.add(&program(16 + at)))
        .collect();
    let size = index.size();
    assert_eq!((size.keyed, size.scanned), (most as usize, 10));
    let mut bytes = vec![0; 20_000];
    for at in [500, most as usize + 20] {
        bytes[at..at + 4].copy_from_slice(&[1, 2, 3, 4]);
    }
    let packet = (bytes, 20_000);
    index.judge(&[frame(&packet, false)], &FrameSet::default());
    let accepting = ids.iter().filter(|id| !index.accepted(**id).is_empty());
    assert_eq!(accepting.count(), 2);
    index.forget();
    ids.into_iter().for_each(|id| index.remove(id));
    assert_eq!(index.size(), IndexSize::default());
}
