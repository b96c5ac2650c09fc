//! The console as a person uses it.

use super::*;

#[test]
fn lines_come_in_parts_and_an_endless_one_is_forgotten() {
    let mut console = Console::default();
    assert!(console.lines(b"port/pr").is_empty());
    assert_eq!(console.lines(b"int\r\nhelp\n"), ["port/print", "help"]);
    for _ in 0..100 {
        console.lines(&[b'x'; 100]);
    }
    assert!(console.line.len() <= MAX_LINE);
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
