// The language of the page. Texts of the page are in texts_en.js and texts_ko.js, those of the steps in the site's data.
import { ENGLISH } from "./texts_en.js";
import { KOREAN } from "./texts_ko.js";

const LANGUAGES = { en: ENGLISH, ko: KOREAN };
let language = "en";

export const currentLanguage = () => language;
export const otherLanguage = () => (language === "en" ? "ko" : "en");

export const fill = (text, values = {}) => text.replace(/\{(\w+)\}/g, (match, name) => values[name] ?? match);

export function t(key, values = {}) {
  const text = LANGUAGES[language][key] ?? ENGLISH[key];
  if (text === undefined) throw new Error(`no text named ${key}`);
  return fill(text, values);
}

export const hasText = (key) => key in ENGLISH;

// Translates every element with data-i18n (its text) or data-i18n-label (its aria-label and tooltip).
export function setLanguage(code) {
  language = code in LANGUAGES ? code : "en";
  document.documentElement.lang = language;
  document.title = t("title");
  for (const node of document.querySelectorAll("[data-i18n]")) node.textContent = t(node.dataset.i18n);
  for (const node of document.querySelectorAll("[data-i18n-label]")) node.setAttribute("aria-label", t(node.dataset.i18nLabel));
}
