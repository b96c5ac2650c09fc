use std::time::Duration;

use super::*;
use crate::differential::EXPRESSIONS;
use crate::field::Part;
use crate::libpcap::Library;
use crate::packets;
use crate::packets::{Packet, Random};
use crate::{INSTRUCTION_BYTES, Trust};
use vnplug_bpf::code;

fn compiled(library: &Library, expression: &str) -> Program {
    let text = std::ffi::CString::new(expression).unwrap();
    let list = library.compile(&text, 262_144, 1).expect(expression);
    Program::from_instructions(&list, Trust::Operator).expect(expression)
}

/// A key as a person reads it: `gate offset/length[&mask]…=value`, with `!` if it is sure.
fn shown(key: &Key) -> String {
    let gate = match key.field.gate {
        Some(gate) => format!("{gate:04x}"),
        None => "any".to_owned(),
    };
    let part = |part: &Part| {
        let base = match part.base {
            Base::Start => String::new(),
            Base::Header(at) => format!("x{at}+"),
        };
        let all = u64::MAX >> (64 - 8 * u32::from(part.len));
        let mask = match part.mask == all {
            true => String::new(),
            false => format!("&{:x}", part.mask),
        };
        format!("{base}{}/{}{mask}", part.at, part.len)
    };
    let parts: Vec<String> = key.field.parts.iter().map(part).collect();
    let value = match key.field.is_exact() {
        true if key.is_range() => format!("{:x}..{:x}", key.low, key.high),
        true => format!("{:x}", key.low),
        false => "mixed".to_owned(),
    };
    let sure = if key.sure { "!" } else { "" };
    format!("{gate} {}={value}{sure}", parts.join(","))
}

fn keys(program: &Program) -> Option<Vec<String>> {
    match program.analysis() {
        Analysis::Always => None,
        Analysis::If(keys) => {
            let mut shown: Vec<String> = keys.iter().map(shown).collect();
            shown.sort();
            Some(shown)
        }
    }
}

#[test]
fn keys_of_what_libpcap_makes_of_expressions() {
    let table: &[(&str, &[&str])] = &[
        (
            "src host 10.0.0.1",
            &[
                "0800 26/4=a000001!",
                "0806 28/4=a000001!",
                "8035 28/4=a000001!",
            ],
        ),
        (
            "ip host 10.0.0.1",
            &["0800 26/4=a000001!", "0800 30/4=a000001!"],
        ),
        (
            "ip net 10.1.2.0/23",
            &["0800 26/4&fffffe00=a010200!", "0800 30/4&fffffe00=a010200!"],
        ),
        (
            "ip src host 10.0.0.1 and dst host 10.0.0.2",
            &["0800 26/8=a0000010a000002!"],
        ),
        (
            "ip and tcp port 80",
            &["0800 x14+14/2=50", "0800 x14+16/2=50"],
        ),
        ("ip6 and udp dst port 53", &["86dd 56/2=35"]),
        (
            "ip src host 10.0.0.1 and tcp dst port 80",
            &["0800 26/4,x14+16/2=a0000010050"],
        ),
        (
            "ip and src host 10.0.0.1 and not port 22",
            &["0800 26/4=a000001"],
        ),
        // Where the parts stand does not matter, and one that can be looked up is enough.
        (
            "not port 22 and ip src host 10.0.0.1",
            &["0800 26/4=a000001"],
        ),
        (
            "greater 100 and not net 10.0.0.0/8 and arp",
            &["0806 12/2=806"],
        ),
        (
            "vlan 5",
            &["8100 14/2&fff=5!", "88a8 14/2&fff=5!", "9100 14/2&fff=5!"],
        ),
        (
            "vlan 5 and ip dst host 10.0.0.1",
            &[
                "8100 14/2&fff,34/4=50a000001",
                "88a8 14/2&fff,34/4=50a000001",
                "9100 14/2&fff,34/4=50a000001",
            ],
        ),
        (
            "ether src 02:00:00:00:00:01",
            &["any 6/4,10/2=20000000001!"],
        ),
        ("ether dst 02:00:00:00:00:01", &["any 0/4,4/2=20000000001!"]),
        ("ip6 src host 2001:db8::1", &["86dd 22/8,30/8=mixed"]),
        (
            "ip6 src net 2001:db8:1::/48",
            &["86dd 22/8&ffffffffffff0000=20010db800010000!"],
        ),
        (
            "ip and tcp portrange 1000-2000",
            &["0800 x14+14/2=3e8..7d0", "0800 x14+16/2=3e8..7d0"],
        ),
        (
            "ip src host 10.0.0.1 and udp dst portrange 1-99",
            &["0800 26/4=a000001"],
        ),
        ("ip6 and udp src portrange 53-60", &["86dd 54/2=35..3c"]),
        ("ip[2:2] >= 100 and ip[2:2] < 500", &["0800 16/2=64..1f3"]),
        (
            "vlan and ip[8] < 5",
            &["8100 26/1=0..4", "88a8 26/1=0..4", "9100 26/1=0..4"],
        ),
        ("ip", &["0800 12/2=800!"]),
        ("arp", &["0806 12/2=806!"]),
        ("ip proto 89", &["0800 23/1=59!"]),
        ("icmp", &["0800 23/1=1!"]),
        ("tcp", &["0800 23/1=6!", "86dd 20/1=6!", "86dd 54/1=6"]),
        ("tcp[tcpflags] & tcp-syn != 0", &["0800 23/1=6"]),
        (
            "ip src host 10.0.0.1 or arp",
            &["0800 26/4=a000001!", "0806 12/2=806!"],
        ),
    ];
    let library = Library::load().unwrap();
    for (expression, expected) in table {
        let found = keys(&compiled(&library, expression));
        let expected = expected.iter().map(|key| (*key).to_owned()).collect();
        assert_eq!(found, Some(expected), "{expression}");
    }
}

#[test]
fn what_has_no_key_is_judged_always_and_what_accepts_nothing_never() {
    let library = Library::load().unwrap();
    for expression in [
        "not host 10.0.0.1",
        "host 10.0.0.1 or greater 1000",
        "ip6 protochain 6",
        "not tcp",
        "greater 100",
    ] {
        assert_eq!(keys(&compiled(&library, expression)), None, "{expression}");
    }
    assert_eq!(Program::accept(0).analysis(), &Analysis::If(Vec::new()));
    assert_eq!(Program::accept(1).analysis(), &Analysis::Always);
}

#[test]
fn a_list_of_hosts_has_a_key_for_each_until_there_are_too_many() {
    let library = Library::load().unwrap();
    let hosts = |count: usize| {
        let hosts: Vec<String> = (0..count).map(|n| format!("src host 10.0.0.{n}")).collect();
        keys(&compiled(
            &library,
            &format!("ip and ({})", hosts.join(" or ")),
        ))
    };
    assert_eq!(hosts(200).map(|keys| keys.len()), Some(200));
    let pairs: Vec<String> = (0..40).map(|n| format!("10.0.0.{n}")).collect();
    let all = pairs.join(" or ");
    let many = format!("ip and src host ({all}) and dst host ({all})");
    assert_eq!(keys(&compiled(&library, &many)), None);
}

/// Asserts what the analysis promises, for one program on some frames.
fn assert_sound(program: &Program, frames: &[Packet], name: &dyn std::fmt::Debug) -> (u64, u64) {
    let Analysis::If(keys) = program.analysis() else {
        return (0, 0);
    };
    let (mut held, mut sure) = (0, 0);
    for (bytes, wire_len) in frames {
        let gate = bytes
            .get(12..14)
            .map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
        let holds = |key: &&Key| {
            let gated = key.field.gate.is_none() || key.field.gate == gate;
            let value = key.field.of(bytes);
            gated && value.is_some_and(|value| (key.low..=key.high).contains(&value))
        };
        let accepts = program.run(bytes, *wire_len) != 0;
        let holding: Vec<&Key> = keys.iter().filter(holds).collect();
        assert!(
            !accepts || !holding.is_empty(),
            "{name:?} accepts {bytes:02x?}"
        );
        if holding.iter().any(|key| key.sure) {
            assert!(accepts, "{name:?} is not sure of {bytes:02x?}");
            sure += 1;
        }
        held += u64::from(!holding.is_empty());
    }
    (held, sure)
}

#[test]
fn accepted_frames_have_a_key_and_sure_keys_are_accepted() {
    let library = Library::load().unwrap();
    let mut frames = packets::frames(6_000, 0x1dea);
    frames.extend(packets::cuts(60, 0xc07));
    let own = [
        "host 10.0.0.1",
        "net 10.0.0.0/25",
        "net 192.168.0.0/16 and not host 192.168.3.4",
        "tcp port 80 or udp port 53",
        "vlan 5 and host 10.0.0.1",
        "vlan and vlan 7 and tcp port 443",
        "ether host 02:00:00:00:00:01 and ip",
        "ip6 host 2001:db8::1 or host 10.0.0.2",
        "ip6 net 2001:db8::/64 and port 80",
        "(host 10.0.0.1 or host 10.0.0.2) and (port 22 or port 443)",
        "host 10.0.0.1 and portrange 20-90",
        "mpls 1024 and host 10.0.0.1",
        "pppoes 1 and tcp port 80",
        "src host 10.0.0.1 and dst host 10.0.0.2 and src port 80 and dst port 443",
        "arp host 10.0.0.1",
        "ip[12:4] = 0x0a000001 and ip[8] = 64",
    ];
    let (mut held, mut sure) = (0, 0);
    for expression in EXPRESSIONS.iter().chain(&own) {
        let program = compiled(&library, expression);
        let (h, s) = assert_sound(&program, &frames, expression);
        held += h;
        sure += s;
    }
    assert!(held > 10_000 && sure > 5_000, "{held} {sure}");
}

#[test]
fn sums_of_what_a_program_chose_do_not_wrap() {
    let op = |code, k| Instruction {
        code,
        jt: 0,
        jf: 0,
        k,
    };
    let equal = |k, jf| Instruction {
        jf,
        ..op(code::JEQ_K, k)
    };
    // By X, a shift may be of any width: 1 and 2^32 - 1 are not 0.
    let shifted = [
        op(code::LD_W_ABS, 26),
        op(code::RSH_K, 1),
        op(code::LDX_IMM, u32::MAX),
        op(code::RSH_X, 0),
        equal(0, 1),
        op(code::RET, 1),
        op(code::RET, 0),
    ];
    // Three bytes of a word that ends at 2^32 - 1, of which four would be beyond.
    let far = [
        op(code::LDX_IMM, 0xffff_fff0),
        op(code::LD_W_IND, 11),
        op(code::AND_K, 0x00ff_ffff),
        equal(7, 1),
        op(code::RET, 1),
        op(code::RET, 0),
    ];
    let frames = packets::frames(50, 0x1dea);
    for list in [&shifted[..], &far] {
        let program = Program::from_instructions(list, Trust::Guest).unwrap();
        if let Analysis::If(_) = program.analysis() {
            assert_sound(&program, &frames, &list);
        }
    }
}

#[test]
fn the_promise_holds_for_random_programs() {
    let frames = packets::frames(200, 0xface);
    let mut random = Random(0xa11);
    let (mut keyed, mut held, mut sure) = (0, 0, 0);
    for _ in 0..60_000 {
        let len = 2 + random.below(14);
        let mut list: Vec<Instruction> = (0..len).map(|_| instruction(&mut random)).collect();
        list.push(Instruction {
            code: code::RET,
            jt: 0,
            jf: 0,
            k: random.below(2) as u32,
        });
        list.push(Instruction {
            code: code::RET,
            jt: 0,
            jf: 0,
            k: random.below(2) as u32,
        });
        list.push(Instruction {
            code: code::RET_A,
            jt: 0,
            jf: 0,
            k: 0,
        });
        let Ok(program) = Program::from_instructions(&list, Trust::Guest) else {
            continue;
        };
        let frames = &frames[random.below(150)..][..50];
        let (h, s) = assert_sound(&program, frames, &list);
        keyed += u64::from(program.analysis() != &Analysis::Always);
        held += h;
        sure += s;
    }
    assert!(
        keyed > 3_000 && held > 1_000 && sure > 300,
        "{keyed} {held} {sure}"
    );
}

/// Loads, masks and comparisons, as filters have them, and anything else now and then.
fn instruction(random: &mut Random) -> Instruction {
    let offsets = [12, 14, 16, 20, 23, 26, 28, 30, 34, 54];
    let (code, k) = match random.below(16) {
        0..=2 => (code::LD_H_ABS, random.pick(&offsets)),
        3 | 4 => (code::LD_W_ABS, random.pick(&offsets)),
        5 => (code::LD_B_ABS, random.pick(&offsets)),
        6 => (code::LDX_MSH, 14),
        7 => (
            random.pick(&[code::LD_H_IND, code::LD_W_IND, code::LD_B_IND]),
            random.pick(&[14, 16, 0]),
        ),
        8 => (
            code::AND_K,
            random.pick(&[0xff, 0xffff_ff00, 0xfff, 0x00f0, 0]),
        ),
        9 => (code::RSH_K, random.pick(&[1, 4, 8, 16])),
        10 => (
            random.pick(&[code::JSET_K, code::JGT_K, code::JGE_K, code::JEQ_X]),
            random.pick(&[0x1fff, 80, 1]),
        ),
        11 => (
            random.pick(&[
                code::TAX,
                code::TXA,
                code::ST,
                code::LD_MEM,
                code::LDX_MEM,
                code::STX,
                code::LD_IMM,
                code::ADD_K,
                code::LSH_K,
                code::OR_K,
                code::LD_LEN,
                code::DIV_X,
                code::AND_X,
            ]),
            random.below(4) as u32,
        ),
        _ => (
            code::JEQ_K,
            random.pick(&[
                0x0800,
                0x86dd,
                0x8100,
                0x0a00_0001,
                0x0a00_0002,
                6,
                17,
                80,
                443,
                53,
                5,
                0x45,
                0,
                0x0a00,
                0xc0a8_0304,
                0x2001_0db8,
            ]),
        ),
    };
    Instruction {
        code,
        jt: random.below(4) as u8,
        jf: random.below(4) as u8,
        k,
    }
}

#[test]
fn hostile_programs_are_analysed_in_bounded_time() {
    // A comparison at every other place, each of which may go two ways that meet again.
    let ladder: Vec<Instruction> = (0..2_000_u32)
        .flat_map(|n| {
            [
                Instruction {
                    code: code::LD_B_ABS,
                    jt: 0,
                    jf: 0,
                    k: n,
                },
                Instruction {
                    code: code::JEQ_K,
                    jt: 0,
                    jf: 0,
                    k: n & 0xff,
                },
            ]
        })
        .chain([Instruction {
            code: code::RET,
            jt: 0,
            jf: 0,
            k: 1,
        }])
        .collect();
    let program = Program::from_instructions(&ladder, Trust::Guest).unwrap();
    assert!(program.instructions().len() * INSTRUCTION_BYTES < 65_536);
    assert_eq!(program.analysis(), &Analysis::Always);
}

#[test]
#[ignore = "a measurement: cargo test --release -p vnplugd analysis_at_its_worst -- --ignored --nocapture"]
fn analysis_at_its_worst() {
    let library = Library::load().unwrap();
    let timed = |name: &str, program: &Program| {
        let begin = cpu_time();
        let keys = keys(program).map(|keys| keys.len());
        println!("{:?} {keys:?} keys: {name}", cpu_time() - begin);
    };
    for count in [100, 300, 500] {
        for what in ["src host", "host"] {
            let hosts: Vec<String> = (0..count)
                .map(|n| format!("10.0.{}.{}", n / 256, n % 256))
                .collect();
            let text = format!("ip {what} ({})", hosts.join(" or "));
            timed(&text[..20], &compiled(&library, &text));
        }
    }
    let mut random = Random(0xbad);
    let mut worst = Duration::ZERO;
    for round in 0..3_000 {
        let len = random.pick(&[50, 200, 1_000, 4_000]);
        // Many comparisons that hold, and few that end it.
        let mut list: Vec<Instruction> = Vec::new();
        for nth in 0..len {
            list.push(Instruction {
                code: [code::LD_W_ABS, code::LD_H_ABS, code::LD_B_ABS][nth % 3],
                jt: 0,
                jf: 0,
                k: random.below(400) as u32,
            });
            list.push(Instruction {
                code: random.pick(&[code::JEQ_K, code::JEQ_K, code::JGT_K, code::JSET_K]),
                jt: 0,
                jf: random.pick(&[0, 0, 1, 2]),
                k: random.next(),
            });
        }
        list.truncate(4_000);
        for _ in 0..4 {
            list.push(Instruction {
                code: code::RET,
                jt: 0,
                jf: 0,
                k: random.below(2) as u32,
            });
        }
        let Ok(program) = Program::from_instructions(&list, Trust::Guest) else {
            continue;
        };
        let begin = cpu_time();
        program.analysis();
        let took = cpu_time() - begin;
        if took > worst {
            worst = took;
            println!("{worst:?} in round {round}, {len} pairs");
        }
    }
}

/// Of this thread: the machine may be busy.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
