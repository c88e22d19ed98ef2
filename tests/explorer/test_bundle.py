"""Joining ES modules into a classic script."""

from __future__ import annotations

import pytest

from vitral.explorer.bundle import bundle_modules


def write(folder, **texts: str):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".js").write_text(text)
    return folder.resolve() / "main.js"


def test_modules_run_in_the_order_of_their_imports_with_names_of_their_own(browser, tmp_path):
    main = write(
        tmp_path,
        main='import {\n  twice,\n  Counter\n} from "./lib/a.js";\nimport { secret } from "./b.js";\n'
        "globalThis.result = [twice(secret), new Counter().count, helper()];\nfunction helper() { return 'main'; }\n",
        lib__a='import { secret, $ } from "../b.js";\nexport const twice = (x) => 2 * $(x);\n'
        "export class Counter { count = secret + 1; }\nfunction helper() { return 'a'; }\n",
        b="export const secret = 21;\nexport const $ = (x) => x;\n",
    )
    page = browser.new_page()
    page.add_script_tag(content=bundle_modules(main))
    assert page.evaluate("result") == [42, 22, "main"]
    page.close()


def test_text_and_folder_of_modules_can_be_replaced(tmp_path):
    main = write(
        tmp_path, main='import { a } from "./other/a.js";\nimport { b } from "./b.js";\n', b="export const b = 1;\n"
    )
    write(tmp_path / "elsewhere", a="export const a = 'elsewhere';\n")
    folder = tmp_path.resolve()
    text = bundle_modules(main, {folder / "b.js": "export const b = 2;\n"}, {folder / "other": folder / "elsewhere"})
    assert "const a = 'elsewhere';" in text
    assert "const b = 2;" in text
    assert "import" not in text.replace("imports", "")
    assert "export" not in text


def test_circular_imports_are_refused(tmp_path):
    main = write(
        tmp_path, main='import { a } from "./a.js";\n', a='import { m } from "./main.js";\nexport const a = 1;\n'
    )
    with pytest.raises(ValueError, match=r"circular import: main\.js -> a\.js -> main\.js"):
        bundle_modules(main)


@pytest.mark.parametrize("line", ['import a from "./a.js";', "export default 1;", 'export * from "./a.js";'])
def test_other_forms_of_import_and_export_are_refused(tmp_path, line):
    with pytest.raises(ValueError, match="cannot bundle"):
        bundle_modules(write(tmp_path, main=f"{line}\n", a="export const a = 1;\n"))
