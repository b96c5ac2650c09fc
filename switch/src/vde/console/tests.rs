//! The console as a person uses it.

use super::*;

#[test]
fn what_comes_at_once_is_whole_unless_it_fills_a_read_and_an_endless_line_is_forgotten() {
    let mut console = Console::default();
    assert_eq!(console.lines(b"port/print"), ["port/print"]);
    assert_eq!(
        console.lines(b"port/print\r\nhelp\n"),
        ["port/print", "help"]
    );
    let long = [&b"help\n"[..], &[b'x'; MAX_REQUEST - 5]].concat();
    assert_eq!(console.lines(&long), ["help"]);
    let rest = "x".repeat(MAX_REQUEST - 5);
    assert_eq!(console.lines(b"y\n"), [format!("{rest}y")]);
    for _ in 0..100 {
        assert!(console.lines(&[b'x'; MAX_REQUEST]).is_empty());
        assert!(console.line.len() <= MAX_LINE);
    }
}

#[test]
fn addresses_are_read_as_people_type_them() {
    let at = |vlan| Key::new([2, 0, 0, 0, 0, 0xaf], vlan);
    assert_eq!(key("02:0:0:0:0:af"), Some(at(0)));
    assert_eq!(key("02.00.00.00.00.AF 7"), Some(at(7)));
    for wrong in [
        "",
        "02:00",
        "02:0:0:0:0:af:1",
        "02:0:0:0:0:x",
        "02:0:0:0:0:af 4096",
    ] {
        assert_eq!(key(wrong), None, "{wrong}");
    }
}
