//! The compiling process, by the real executable: what it answers, and that nothing kills the next
//! answer.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use vnplug_filter::{
    Compiler, FilterError, MAX_EXPRESSION_BYTES, MAX_INSTRUCTIONS, Program, WALL_LIMIT,
};

const ETHERNET: u32 = 1;

fn compiler() -> Compiler {
    Compiler::new(PathBuf::from(env!("CARGO_BIN_EXE_vnplugd")))
}

fn compile(compiler: &mut Compiler, expression: &str) -> Result<Program, FilterError> {
    compiler.compile(expression, 262_144, ETHERNET)
}

/// The message, verbatim, of an expression that libpcap refuses.
fn refusal(expression: &str) -> String {
    match compile(&mut compiler(), expression) {
        Err(FilterError::Refused(message)) => message,
        other => panic!("{expression}: {other:?}"),
    }
}

/// A frame with nothing but an EtherType.
fn frame(ether_type: u16) -> [u8; 60] {
    let mut frame = [0; 60];
    frame[12..14].copy_from_slice(&ether_type.to_be_bytes());
    frame
}

#[test]
fn an_expression_becomes_a_program_with_the_snaplen() {
    let program = compiler().compile("ip", 96, ETHERNET).unwrap();
    assert_eq!(program.run(&frame(0x0800), 60), 96);
    assert_eq!(program.run(&frame(0x86dd), 60), 0);
    assert!(!program.loops());
}

#[test]
fn the_link_type_matters() {
    let raw = compiler().compile("ip", 96, 12).unwrap();
    assert_eq!(raw.run(&[0x45; 20], 20), 96);
    assert!(matches!(
        compiler().compile("ether proto 5", 96, 12),
        Err(FilterError::Refused(_))
    ));
}

#[test]
fn an_empty_expression_takes_everything_and_needs_no_process() {
    let mut nowhere = Compiler::new(PathBuf::from("/nonexistent/vnplugd"));
    for expression in ["", "  \t\n"] {
        let program = nowhere.compile(expression, 128, ETHERNET).unwrap();
        assert_eq!(program, Program::accept(128));
    }
    assert!(matches!(
        compile(&mut nowhere, "ip"),
        Err(FilterError::Start(_))
    ));
}

#[test]
fn protochain_compiles_and_says_that_it_loops() {
    assert!(
        compile(&mut compiler(), "ip6 protochain 6")
            .unwrap()
            .loops()
    );
}

#[test]
fn libpcaps_messages_arrive_verbatim() {
    assert_eq!(
        refusal("ip broadcast"),
        "netmask not known, so 'ip broadcast' not supported"
    );
    assert_eq!(
        refusal("ifname eth0"),
        "ifname supported only on PF linktype"
    );
    assert!(refusal("tcp port").contains("syntax error"));
    assert!(refusal("port 99999").contains("99999"));
}

#[test]
fn direction_words_are_refused() {
    for expression in ["inbound", "outbound", "ip and inbound"] {
        assert!(refusal(expression).starts_with("inbound/outbound not supported"));
    }
}

#[test]
fn service_names_and_the_hosts_file_resolve() {
    let mut compiler = compiler();
    let by_name = compile(&mut compiler, "tcp port https").unwrap();
    assert_eq!(by_name, compile(&mut compiler, "tcp port 443").unwrap());
    assert!(compile(&mut compiler, "host localhost").is_ok());
    assert!(compile(&mut compiler, "ip proto gre").is_ok());
}

#[test]
fn other_host_names_fail_at_once() {
    let mut compiler = compiler();
    compile(&mut compiler, "ip").unwrap();
    // A resolver that asked a name server would wait for it five seconds, each time.
    let is_quick = |number: u32| {
        let start = Instant::now();
        let name = format!("www{number}.example.org");
        let result = compile(&mut compiler, &format!("host {name}"));
        assert!(matches!(result, Err(FilterError::Refused(text)) if text.contains(&name)));
        start.elapsed() < Duration::from_secs(4)
    };
    assert!((0..5).any(is_quick));
}

#[test]
fn too_long_and_nul_are_refused_before_any_process() {
    let mut nowhere = Compiler::new(PathBuf::from("/nonexistent/vnplugd"));
    for len_bytes in [MAX_EXPRESSION_BYTES + 1, 1 << 20] {
        let result = compile(&mut nowhere, &"(".repeat(len_bytes));
        assert!(matches!(result, Err(FilterError::TooLong { len_bytes: n }) if n == len_bytes));
    }
    let result = compile(&mut nowhere, "ip\0 or tcp");
    assert!(matches!(result, Err(FilterError::Nul { at: 2 })));
    let result = nowhere.compile("ip", 0, ETHERNET);
    assert!(matches!(result, Err(FilterError::Refused(_))));
}

/// Expressions made to cost much; each must end in an error or a program, soon.
#[test]
fn bombs_are_bounded_and_the_next_expression_compiles() {
    let fill = |unit: &str| unit.repeat(MAX_EXPRESSION_BYTES / unit.len() - 8);
    let terms = |glue: &str| {
        let mut text = String::from("tcp port 1");
        for port in 2.. {
            let term = format!(" {glue} tcp port {port}");
            if text.len() + term.len() > MAX_EXPRESSION_BYTES {
                return text;
            }
            text += &term;
        }
        text
    };
    let bombs = [
        format!("{}ip{}", "(".repeat(8000), ")".repeat(8000)),
        "(".repeat(MAX_EXPRESSION_BYTES),
        format!("{}ip", fill("not ")),
        format!("{}ip", fill("ip or ")),
        format!("{}ip", fill("vlan and ")),
        format!("{}ip", fill("mpls and ")),
        format!("{}ip", fill("pppoes or ")),
        format!("ip[{}0] = 1", fill("1+")),
        format!("{}0{} = 1", "ip[".repeat(3000), "]".repeat(3000)),
        format!("{}ip", fill("ip6 protochain 6 or ")),
        format!("{}ip", fill("port 1 or ip[ip[1]:4] = 5 or ")),
        terms("or"),
        terms("and"),
        fill("\u{ff}\\'\""),
    ];
    let mut compiler = compiler();
    for (number, bomb) in bombs.iter().enumerate() {
        let start = Instant::now();
        let result = compile(&mut compiler, bomb);
        let took = start.elapsed();
        println!(
            "bomb {number} {:.20}…: {took:?}, {}",
            bomb,
            match &result {
                Ok(program) => format!("{} instructions", program.instructions().len()),
                Err(error) => format!("{error:.80}"),
            }
        );
        // The wall limit, and the start of a process on a busy machine.
        assert!(
            took < WALL_LIMIT + Duration::from_secs(20),
            "bomb {number} took {took:?}"
        );
        if let Ok(program) = result {
            assert!(program.instructions().len() <= MAX_INSTRUCTIONS);
        }
        assert!(
            compiler
                .compile("tcp", 100 + number as u32, ETHERNET)
                .is_ok(),
            "after {number}"
        );
    }
}

#[test]
fn a_list_of_fifty_hosts_compiles() {
    let hosts: Vec<String> = (0..50).map(|n| format!("host 10.0.1.{n}")).collect();
    let program = compile(&mut compiler(), &hosts.join(" or ")).unwrap();
    let mut frame = frame(0x0800);
    for last in 0..=255 {
        frame[30..34].copy_from_slice(&[10, 0, 1, last]);
        assert_eq!(program.run(&frame, 60) != 0, last < 50, "10.0.1.{last}");
    }
}

#[test]
fn a_compiler_that_answers_nonsense_is_an_error() {
    for exe in ["/bin/true", "/bin/echo", "/bin/cat"] {
        let mut compiler = Compiler::new(PathBuf::from(exe));
        let result = compile(&mut compiler, "ip");
        assert!(
            matches!(result, Err(FilterError::Start(_) | FilterError::Crashed(_))),
            "{exe}"
        );
    }
}

#[test]
fn a_thousand_expressions_compile_in_seconds_and_repeat_for_nothing() {
    let mut compiler = compiler();
    let texts: Vec<String> = (0..1000)
        .map(|n| format!("tcp port {} and host 10.0.{}.{}", n + 1, n / 250, n % 250))
        .collect();
    let start = Instant::now();
    for text in &texts {
        compile(&mut compiler, text).unwrap();
    }
    let first = start.elapsed();
    let again = (0..5).map(|_| {
        let start = Instant::now();
        for text in &texts {
            compile(&mut compiler, text).unwrap();
        }
        start.elapsed()
    });
    // The best: a busy machine may keep it waiting at times.
    let again = again.min().unwrap();
    println!("1000 new expressions {first:?}, the same again {again:?}");
    assert!(first < Duration::from_secs(300), "{first:?}");
    assert!(again < first / 10, "{again:?} after {first:?}");
}
