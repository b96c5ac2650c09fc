//! What stands on the screen, and what keys do to it.

use std::path::Path;
use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Cell;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::{Color, Modifier};
use vnplug::Counted;
use vnplug_ring::counters::Curve;

use super::asker::Answer;
use super::state::State;
use super::tables::brief;
use super::{keys, view};

fn counted(kind: &str, name: &str, labels: &[(&str, &str)], values: &[(&str, u64)]) -> Counted {
    let labels = labels.iter().map(|(k, v)| ((*k).into(), (*v).into()));
    Counted {
        kind: kind.into(),
        name: name.into(),
        labels: labels.collect(),
        values: values.iter().map(|(k, v)| ((*k).into(), *v)).collect(),
    }
}

/// A daemon's counters after this many seconds.
fn after(seconds: u64) -> Vec<Counted> {
    let source = |name: &str, state: &str, pps: u64| {
        let values = [
            ("seen", pps * seconds),
            ("bytes", 100 * pps * seconds),
            ("kernel_dropped", seconds),
            ("departed_accounted", 5),
            ("departed_delivered", 3),
            ("patience_ms", 1500),
        ];
        counted(
            "source",
            name,
            &[("kind", "gen"), ("state", state)],
            &values,
        )
    };
    let port = |id: &str, owner: &str, pps: u64, lost: u64| {
        let labels = [
            ("device", "host:eth1"),
            ("owner", owner),
            ("state", "open"),
            ("label", "tcpdump\u{1b}[2J"),
        ];
        let values = [
            ("delivered", pps * seconds),
            ("dropped_full", lost * seconds),
        ];
        counted("port", id, &labels, &values)
    };
    let vm = [("pool_bytes", 64 << 20), ("pool_free", 16 << 20)];
    vec![
        counted("daemon", "vnplugd", &[], &[("ports_opened", 2)]),
        source("eth1", "up", 1_250_000),
        source("eth2", "gone", 10),
        port("1", "uid 0", 500, 0),
        port("2", "vm probe", 900_000, 70),
        counted("vm", "probe", &[("kind", "qemu"), ("state", "ready")], &vm),
    ]
}

fn hear(state: &mut State, start: Instant, seconds: u64, told: Result<Vec<Counted>, &str>) {
    state.heard(Answer {
        at: start + Duration::from_secs(seconds),
        told: told
            .map(|all| ("vnplugd 0.1.0".into(), all))
            .map_err(str::to_owned),
    });
}

/// It has run for ten seconds.
fn running() -> (State, Instant) {
    let mut state = State::new(Path::new("/run/vnplug/vnplug.sock"));
    let start = Instant::now();
    for seconds in 1..=10 {
        hear(&mut state, start, seconds, Ok(after(seconds)));
    }
    (state, start)
}

fn screen(state: &mut State, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(frame, state)).unwrap();
    let buffer = terminal.backend().buffer();
    let rows = buffer.content.chunks(usize::from(width));
    let rows = rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>());
    rows.map(|row| row.trim_end().to_owned() + "\n").collect()
}

fn press(state: &mut State, key: KeyCode) {
    keys::typed(state, KeyEvent::new(key, KeyModifiers::NONE));
}

fn line<'a>(screen: &'a str, begins: &str) -> &'a str {
    let found = screen.lines().find(|line| line.starts_with(begins));
    found.unwrap_or_else(|| panic!("no line {begins:?}:\n{screen}"))
}

#[test]
fn rates_losses_and_states_are_on_the_screen() {
    let (mut state, _) = running();
    let screen = screen(&mut state, 120, 30);
    assert!(
        screen.starts_with("vnplugd 0.1.0  2 sources, 2 ports, 1 VM  /run/vnplug/vnplug.sock\n"),
        "{screen}"
    );
    assert!(line(&screen, "seen").contains("1.25 M/s"), "{screen}");
    assert!(
        line(&screen, "seen").contains(" █████████  read"),
        "{screen}"
    );
    assert!(line(&screen, "seen").contains("1 Gbit/s"), "{screen}");
    assert!(line(&screen, "lost/s").contains("kernel 2"), "{screen}");
    assert!(line(&screen, "lost/s").contains("ring 70"), "{screen}");
    assert!(
        line(&screen, "lost  ").contains("724 in all    ring: the reader is too slow"),
        "{screen}"
    );
    let eth1: Vec<&str> = line(&screen, "eth1").split_whitespace().collect();
    assert_eq!(
        eth1[..9],
        ["eth1", "gen", "up", "1.25", "M", "1", "G", "1", "10"],
        "{screen}"
    );
    // A name acts on no terminal.
    assert!(
        line(&screen, "2      host:eth1").contains("tcpdump\\x1b[2J"),
        "{screen}"
    );
    let probe: Vec<&str> = line(&screen, "probe").split_whitespace().collect();
    assert_eq!(
        probe,
        [
            "probe", "qemu", "ready", "1", "900", "k", "70", "64", "MiB", "75", "%"
        ]
    );
}

#[test]
fn keys_sort_choose_and_explain() {
    let (mut state, _) = running();
    press(&mut state, KeyCode::Tab);
    let order = |screen: &str| -> Vec<char> {
        let ports = screen.lines().filter(|line| line.contains("host:eth1"));
        ports.filter_map(|line| line.chars().next()).collect()
    };
    let fast = screen(&mut state, 120, 30);
    assert_eq!(order(&fast), ['2', '1'], "the fastest first");
    press(&mut state, KeyCode::Char('r'));
    assert_eq!(order(&screen(&mut state, 120, 30)), ['1', '2']);
    // By the first column: the order in which they were opened.
    press(&mut state, KeyCode::Char('r'));
    for _ in 0..6 {
        press(&mut state, KeyCode::Char('s'));
    }
    let sorted = screen(&mut state, 120, 30);
    assert!(sorted.contains("PORT▾"), "{sorted}");
    assert_eq!(order(&sorted), ['1', '2']);
    press(&mut state, KeyCode::Down);
    press(&mut state, KeyCode::Enter);
    let details = screen(&mut state, 120, 30);
    assert!(details.contains(" port 2 "), "{details}");
    let dropped = details
        .lines()
        .find(|line| line.contains("dropped_full"))
        .unwrap();
    assert!(
        dropped.contains("700")
            && dropped.contains("70/s")
            && dropped.contains("its ring was full")
    );
    press(&mut state, KeyCode::Esc);
    // Nor does it end: on a slow line an arrow can begin with it alone.
    press(&mut state, KeyCode::Esc);
    assert!(!state.is_over());
    press(&mut state, KeyCode::Char('?'));
    assert!(screen(&mut state, 120, 30).contains("sort by the next column"));
    press(&mut state, KeyCode::Char('q'));
    assert!(state.is_over());
}

#[test]
fn a_daemon_that_goes_and_comes_back_is_told() {
    let (mut state, start) = running();
    hear(&mut state, start, 11, Err("connection refused"));
    let gone = screen(&mut state, 120, 30);
    assert!(
        gone.starts_with("no answer for 0 s: connection refused  asking again"),
        "{gone}"
    );
    assert!(gone.contains("host:eth1"), "what was known stays:\n{gone}");
    // Another one, whose counters begin at 0: no rate is made of that.
    hear(&mut state, start, 12, Ok(after(1)));
    let back = screen(&mut state, 120, 30);
    assert!(back.contains("restarted while this ran: 1"), "{back}");
    let eth1: Vec<&str> = line(&back, "eth1").split_whitespace().collect();
    assert_eq!(eth1[3], "0", "{back}");
    hear(&mut state, start, 13, Ok(after(2)));
    assert!(line(&screen(&mut state, 120, 30), "eth1").contains("1.25 M"));
}

#[test]
fn it_can_be_stopped() {
    let (mut state, start) = running();
    press(&mut state, KeyCode::Char(' '));
    hear(&mut state, start, 11, Ok(Vec::new()));
    let stopped = screen(&mut state, 120, 30);
    assert!(
        stopped.contains("STOPPED") && stopped.contains("host:eth1"),
        "{stopped}"
    );
    // What happens meanwhile is told afterwards.
    hear(&mut state, start, 12, Err("connection refused"));
    hear(&mut state, start, 13, Ok(after(1)));
    press(&mut state, KeyCode::Char(' '));
    hear(&mut state, start, 14, Ok(after(2)));
    let back = screen(&mut state, 120, 30);
    assert!(back.contains("restarted while this ran: 1"), "{back}");
    assert!(!back.contains("STOPPED"), "{back}");
}

#[test]
fn numbers_have_three_digits_and_curves_show_the_least() {
    for (number, text) in [
        (0.0, "0"),
        (0.04, "0"),
        (0.26, "0.3"),
        (99.94, "99.9"),
        (999.7, "1 k"),
        (19_951.0, "20 k"),
        (1_254_999.0, "1.25 M"),
        (125_499_999.0, "125 M"),
    ] {
        assert_eq!(brief(number), text);
    }
    let mut curve = Curve::default();
    assert_eq!(view::bars_of(&curve, 3), "   ");
    for rate in [9.0, 0.0, 0.001, 50.0, 100.0] {
        curve.push(rate);
    }
    assert_eq!(view::bars_of(&curve, 7), "  ▁ ▁▄█");
    assert_eq!(view::bars_of(&curve, 2), "▄█");
}

#[test]
fn every_size_can_be_drawn() {
    let (mut state, _) = running();
    for (width, height) in [(1, 1), (39, 30), (40, 10), (41, 12), (80, 24), (300, 100)] {
        for key in [
            KeyCode::Tab,
            KeyCode::Char('?'),
            KeyCode::Enter,
            KeyCode::Esc,
        ] {
            let text = screen(&mut state, width, height);
            assert_eq!(text.lines().count(), usize::from(height));
            assert_eq!(
                text.contains("too small") || width < 9,
                width < 40 || height < 10
            );
            state.ended = false;
            press(&mut state, key);
        }
    }
    // The chosen table has the room.
    state.table = 1;
    let narrow = screen(&mut state, 80, 12);
    assert!(narrow.contains("host:eth1"), "{narrow}");
}

#[test]
fn without_colours_the_chosen_row_and_losses_stand_out() {
    let (mut state, _) = running();
    let cells = |state: &mut State| {
        let mut terminal = Terminal::new(TestBackend::new(120, 30)).unwrap();
        terminal.draw(|frame| view::draw(frame, state)).unwrap();
        terminal.backend().buffer().content.clone()
    };
    let is_plain = |cell: &Cell| cell.fg == Color::Reset && cell.bg == Color::Reset;
    assert!(!cells(&mut state).iter().all(is_plain), "the control");
    state.has_colours = false;
    let cells = cells(&mut state);
    assert!(cells.iter().all(is_plain));
    for modifier in [Modifier::REVERSED, Modifier::BOLD] {
        assert!(cells.iter().any(|it| it.modifier.contains(modifier)));
    }
}

#[test]
fn a_thousand_ports_are_drawn_where_the_user_looks() {
    let mut state = State::new(Path::new("/x"));
    let start = Instant::now();
    for seconds in 1..=3 {
        let ports = (0..1000).map(|id: u64| {
            let labels = [("state", "open"), ("device", "host:eth1")];
            counted(
                "port",
                &id.to_string(),
                &labels,
                &[("delivered", id * seconds)],
            )
        });
        hear(&mut state, start, seconds, Ok(ports.collect()));
    }
    let full = screen(&mut state, 120, 30);
    assert!(
        full.contains("1,000 ports") && full.contains("Ports (1000)"),
        "{full}"
    );
    assert!(full.contains("\n999 "), "{full}");
    press(&mut state, KeyCode::Tab);
    press(&mut state, KeyCode::End);
    let end = screen(&mut state, 120, 30);
    assert!(end.contains("\n0 ") && !end.contains("\n999 "), "{end}");
}

#[test]
fn nothing_is_a_screen_too() {
    let mut state = State::new(Path::new("/x"));
    assert!(screen(&mut state, 80, 24).starts_with("asking /x …"));
    for key in ['s', 'r', 'j', 'k', '?'] {
        press(&mut state, KeyCode::Char(key));
    }
    press(&mut state, KeyCode::Enter);
    assert!(screen(&mut state, 80, 24).contains("Nothing is chosen"));
}
