//! Native code and our interpreter against libpcap's: the same programs, the same frames, the same verdicts.

use vnplug_bpf::code;
use vnplug_bpf::libpcap::Library;
use vnplug_frame::witness::seed;

use super::native::translate_now;
use super::packets::{Packet, Random, cuts, frames};
use super::{Instruction, Program, Trust};

/// What the expressions are compiled for.
const SNAPLEN: u32 = 262_144;
const ETHERNET: u32 = 1;
const FRAMES: usize = 20_000;

pub(super) const EXPRESSIONS: &[&str] = &[
    "ip",
    "ip6",
    "arp",
    "tcp",
    "udp port 53",
    "tcp port 80",
    "tcp port 80 and host 10.0.0.1",
    "port http or port https",
    "portrange 1000-40000",
    "src portrange 20-80 and dst port 443",
    "host 10.0.0.1 or host 10.0.0.2",
    "src host 10.0.0.1 and not dst host 10.0.0.2",
    "net 10.0.0.0/8",
    "net 192.168.0.0 mask 255.255.0.0",
    "src net 10.0.0 and dst net 192.168",
    "ip6 host 2001:db8::1",
    "ip6 net 2001:db8::/32",
    "ether host 02:00:00:00:00:01",
    "ether src 02:00:00:00:00:01 or ether dst 02:00:00:00:00:02",
    "ether broadcast",
    "ether multicast",
    "ip multicast",
    "ip6 multicast",
    "ether proto 0x88cc",
    "vlan",
    "vlan 5",
    "vlan 5 and tcp port 80",
    "vlan and vlan and ip",
    "vlan 5 and vlan 7 and udp",
    "mpls",
    "mpls 1024 and ip",
    "mpls and mpls and host 10.0.0.1",
    "pppoes",
    "pppoes and tcp port 80",
    "pppoes 1 and ip6",
    "greater 500",
    "less 64",
    "len > 100 and len < 1000",
    "ip[6:2] & 0x1fff != 0",
    "ip[6:2] & 0x3fff != 0 and ip proto 17",
    "tcp[tcpflags] & (tcp-syn|tcp-fin) != 0",
    "tcp[((tcp[12]&0xf0)>>2):4] = 0x47455420",
    "udp[8:2] > udp[4:2]",
    "ip[2:2] - ((ip[0]&0xf)<<2) > 100",
    "icmp[icmptype] = icmp-echo or icmp6",
    "icmp6[icmp6type] = icmp6-echo",
    "ip protochain 6",
    "ip6 protochain 6",
    "ip6 protochain 17 and ip6[6] != 17",
    "sctp or ah or esp or igmp",
    "not (tcp or udp or arp)",
    "ip and not tcp port 22 and not udp portrange 5000-6000",
    "ether[0] & 1 = 0 and ip[16] >= 224",
    "link[12:2] = 0x0800 and ip[len - 30] = 0",
    "((ip[0] * 3 + len) / (ip[1] + 1)) % 7 = 2",
    "ip[1] / (ip[8] - ip[9]) > 3 or ip[8] % (ip[9] & 1) = 0",
    "1 << (ip[1] & 63) = 0 or ip[8] ^ ip[9] = 0x51",
    "llc",
    "stp or isis or iso",
    "ip6[40:4] = 0 or ip6[6] = 44",
    "geneve and ip",
];

#[test]
fn verdicts_are_libpcaps_for_61_expressions_and_2_million_pairs() {
    assert_eq!(EXPRESSIONS.len(), 61);
    let mut frames = frames(FRAMES, 0x5eed);
    frames.extend(cuts(200, 0xc07));
    let (pairs, indifferent) = compare(&frames);
    assert!(pairs > 2_000_000, "{pairs}");
    println!("figure: G-20 verdicts compared = {pairs}");
    println!("figure: G-20 verdicts that differ = 0");
    // The frames must be worth the name: each expression but these takes some and leaves some.
    assert_eq!(indifferent, Vec::<&str>::new());
}

#[test]
#[ignore = "takes minutes: cargo test --release -p vnplugd verdicts_for_500 -- --ignored"]
fn verdicts_for_500_million_pairs() {
    let mut pairs = 0;
    for seed in 1.. {
        let mut frames = frames(FRAMES, seed);
        frames.extend(cuts(200, !seed));
        pairs += compare(&frames).0;
        if pairs > 500_000_000 {
            break;
        }
    }
    println!("{pairs} pairs");
}

/// Compares native code, interpreter and libpcap over all expressions: how many pairs of a frame
/// and native code there were, and the expressions that took none or all of the frames.
fn compare(frames: &[Packet]) -> (usize, Vec<&'static str>) {
    let library = Library::load().unwrap();
    let (mut pairs, mut indifferent) = (0, Vec::new());
    for expression in EXPRESSIONS {
        let text = std::ffi::CString::new(*expression).unwrap();
        let list = library.compile(&text, SNAPLEN, ETHERNET).expect(expression);
        let ours = Program::from_instructions(&list, Trust::Operator).expect(expression);
        translate_now(std::slice::from_ref(&ours));
        assert_eq!(ours.is_native(), !ours.loops(), "{expression}");
        let theirs = library.reference(&list).expect(expression);
        let mut accepted = 0;
        for (frame, wire_len) in frames {
            let Ok(verdict) = ours.interpret(frame, *wire_len) else {
                // libpcap would not come back.
                assert!(ours.loops(), "{expression}");
                continue;
            };
            let reference = theirs.run(frame, *wire_len);
            assert_eq!(verdict, reference, "{expression}: {frame:02x?}");
            let native = ours.run(frame, *wire_len);
            assert_eq!(native, reference, "native {expression}: {frame:02x?}");
            accepted += usize::from(verdict != 0);
        }
        pairs += if ours.is_native() { frames.len() } else { 0 };
        if accepted == 0 || accepted == frames.len() {
            indifferent.push(*expression);
        }
    }
    (pairs, indifferent)
}

#[test]
fn random_programs_are_refused_or_run_as_libpcap_runs_them() {
    let (accepted, looping, native) = compare_random(200_000, seed("random programs"), 10);
    assert!(
        accepted > 10_000 && looping > 100 && native > 1_000,
        "{accepted} accepted, {looping} looping, {native} native"
    );
}

#[test]
#[ignore = "takes minutes: cargo test --release -p vnplugd random_programs_for_long -- --ignored"]
fn random_programs_for_long() {
    println!("{:?}", compare_random(1_000_000, 0xfeed, 1));
}

/// Programs that were accepted, that loop, and that got native code: every `nth` that may.
fn compare_random(tries: usize, seed: u64, nth: usize) -> (usize, usize, usize) {
    let library = Library::load().unwrap();
    let frames = frames(64, 0xf00d);
    let mut random = Random(seed);
    // libpcap leaves scratch memory as it finds it, so each program sets all of it first.
    let stores: Vec<Instruction> = (0..16).map(|k| op(code::ST, k)).collect();
    let (mut accepted, mut looping, mut native) = (0, 0, 0);
    for _ in 0..tries {
        let len = 1 + random.below(24);
        let mut list = stores.clone();
        list.extend((0..len).map(|_| instruction(&mut random, len)));
        list.push(op(code::RET_A, 0));
        let Ok(ours) = Program::from_instructions(&list, Trust::Operator) else {
            continue;
        };
        accepted += 1;
        if accepted % nth == 0 {
            translate_now(std::slice::from_ref(&ours));
            native += usize::from(ours.is_native());
        }
        let theirs = library
            .reference(&list)
            .expect("what we accept, libpcap accepts");
        let some = if ours.is_native() { 64 } else { 8 };
        for (frame, wire_len) in frames.iter().skip(random.below(56)).take(some) {
            match ours.interpret(frame, *wire_len) {
                Ok(verdict) => {
                    assert_eq!(verdict, theirs.run(frame, *wire_len), "{list:?}");
                    assert_eq!(ours.run(frame, *wire_len), verdict, "{list:?} {frame:02x?}");
                }
                // libpcap would not come back.
                Err(_) => assert!(ours.loops()),
            }
        }
        looping += usize::from(ours.loops());
        let again = Program::from_bytes(&ours.to_bytes(), Trust::Operator);
        assert_eq!(again.as_ref(), Ok(&ours));
        let guest = Program::from_bytes(&ours.to_bytes(), Trust::Guest);
        assert_eq!(guest.is_err(), ours.loops());
    }
    (accepted, looping, native)
}

#[test]
fn random_bytes_are_refused_or_run() {
    let mut random = Random(seed("random bytes"));
    let mut accepted = 0;
    for _ in 0..200_000 {
        let mut bytes: Vec<u8> = (0..random.below(4) * 8 + random.below(9))
            .map(|_| random.next() as u8)
            .collect();
        bytes.extend_from_slice(&[6, 0, 0, 0, 1, 0, 0, 0]);
        if let Ok(program) = Program::from_bytes(&bytes, Trust::Operator) {
            accepted += 1;
            let _ = program.run(&bytes, 60);
        }
    }
    assert!(accepted > 100, "{accepted}");
}

#[test]
#[ignore = "a measurement: cargo test --release -p vnplugd interpreter_speed -- --ignored --nocapture"]
fn interpreter_speed_beside_libpcaps() {
    const TOTAL: usize = 1 << 19;
    let library = Library::load().unwrap();
    // Few frames, which the processor's predictor learns, and many, which it does not.
    let frames = frames(4096, 0x5eed);
    let expressions = [
        "ip",
        "tcp port 80 and host 10.0.0.1",
        "vlan 5 and tcp port 80",
        "tcp[((tcp[12]&0xf0)>>2):4] = 0x47455420",
        "not (tcp or udp or arp)",
        "ip6 protochain 6",
    ];
    for (expression, count) in expressions
        .into_iter()
        .flat_map(|e| [(e, 32), (e, frames.len())])
    {
        let text = std::ffi::CString::new(expression).unwrap();
        let list = library.compile(&text, SNAPLEN, ETHERNET).unwrap();
        let ours = Program::from_instructions(&list, Trust::Operator).unwrap();
        let theirs = library.reference(&list).unwrap();
        let measure = |run: &dyn Fn(&[u8], u32) -> u32| {
            let start = cpu_time();
            for _ in 0..TOTAL / count {
                for (frame, wire_len) in &frames[..count] {
                    std::hint::black_box(run(std::hint::black_box(frame), *wire_len));
                }
            }
            (cpu_time() - start) as f64 / TOTAL as f64
        };
        let mut pairs: Vec<(f64, f64)> = (0..9)
            .map(|_| {
                (
                    measure(&|f, w| ours.run(f, w)),
                    measure(&|f, w| theirs.run(f, w)),
                )
            })
            .collect();
        pairs.sort_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)));
        let ratio = |at: usize| pairs[at].0 / pairs[at].1;
        println!(
            "{expression:42} {count:4} frames: ours {:6.1} ns  libpcap {:6.1} ns  ratio {:.2} ({:.2} to {:.2})",
            pairs[4].0,
            pairs[4].1,
            ratio(4),
            ratio(0),
            ratio(8),
        );
    }
}

/// Processor time of this thread in nanoseconds: others' work does not count.
fn cpu_time() -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

fn op(code: u16, k: u32) -> Instruction {
    Instruction {
        code,
        jt: 0,
        jf: 0,
        k,
    }
}

/// An instruction that is likely to pass, in a program of about `len`.
fn instruction(random: &mut Random, len: usize) -> Instruction {
    let known = [
        0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x07, 0x0c, 0x14, 0x15, 0x1c, 0x1d, 0x20, 0x24, 0x25,
        0x28, 0x2c, 0x2d, 0x30, 0x34, 0x35, 0x3c, 0x3d, 0x40, 0x44, 0x45, 0x48, 0x4c, 0x4d, 0x50,
        0x54, 0x5c, 0x60, 0x61, 0x64, 0x6c, 0x74, 0x7c, 0x80, 0x81, 0x84, 0x87, 0x94, 0x9c, 0xa4,
        0xac, 0xb1, 0x06, 0x16,
    ];
    let code = if random.one_in(500) {
        random.next() as u16
    } else {
        random.pick(&known)
    };
    let k = match random.below(8) {
        0 => random.next(),
        1 => random.pick(&[0, 1, u32::MAX, 0x7fff_ffff, 0x8000_0000, 31, 32, 65_535]),
        2 if code == code::JA => (random.below(len) as u32).wrapping_neg(),
        _ => random.below(16) as u32,
    };
    Instruction {
        code,
        jt: random.below(3) as u8,
        jf: random.below(3) as u8,
        k,
    }
}
